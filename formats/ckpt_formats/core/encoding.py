"""How the states of a checkpoint are to be coded where a format can code them: plain data, as a plan carries it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Level = Literal["default", "max"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class EncodingOptions:
    """What the user chose."""

    codec: Mapping[str, Any] | None = None
    """The configuration of one codec for every state that it can hold; None: the best for each."""
    level: Level = "default"
    check: bool = True
    """Decode what was encoded, and compare, before it is believed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, said: Mapping[str, Any] | None) -> "EncodingOptions | None":
        return None if said is None else cls(**said)
