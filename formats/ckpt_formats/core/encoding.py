"""Options for formats that encode the states of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckpt_formats.core.errors import InvalidArgumentError

AUTO = "auto"
"""Instead of the name of a codec: the best codec for each state."""
Level = Literal["default", "max"]
LEVELS: tuple[Level, ...] = get_args(Level)
_HINT = "Leave it out: then the best codec is used for each state."


@dataclass(frozen=True)
class EncodingOptions:
    """Which codecs encode the states, and at which level."""

    codec: Mapping[str, Any] | None = None
    """The configuration of one codec for all states that it can encode; None: the best codec for each state."""
    level: Level = "default"
    check: bool = True
    """Decode each chunk after it was encoded, and compare it with its values."""

    @classmethod
    def of(cls, codec: str, level: Level = "default", check: bool = True) -> "EncodingOptions":
        """The options for `auto`, or for a codec by its text.

        Raises `InvalidArgumentError` if it is unknown or lossy.
        """
        from ckpt_codecs import CodecError, Rounded
        from ckpt_codecs.registry import parse

        if codec == AUTO:
            return cls(None, level, check)
        try:
            parsed = parse(codec)
        except CodecError as error:
            raise InvalidArgumentError(f"--codec: {error}", hint=_HINT) from None
        if not parsed.lossless:
            raise InvalidArgumentError(f"--codec: {parsed.name} changes values, and compress must not", hint=_HINT)
        if isinstance(parsed, Rounded):
            raise InvalidArgumentError("--codec: a copy that is its master, rounded, is always detected", hint=_HINT)
        return cls(parsed.config(), level, check)
