"""What a rank notes of a save beside its tensors: typed JSON, merged by the process of rank 0."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.checkpoint import Group, Origin
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.values import Value
from ckpt_formats.universal.boxes import CheckpointNotes

RANK_PARTS = "rank_parts"
"""The extra with the states of parts that differ from those of an earlier rank: `{"rank-00001": {"loader": …}}`."""
RANDOM_STATES = "random_states"


@dataclass(frozen=True)
class RankNotes:
    """The notes of one rank. All values are typed JSON."""

    step: int
    engine: str = ""
    version: str | None = None
    groups: Sequence[tuple[Any, Sequence[str]]] = ()
    """The options of each group, and the names of its parameters. Of rank 0 only, as the next two."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    order: Sequence[str] = ()
    """The names of the parameters in the order of the model."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's values that are no tensors, by parameter."""
    random_states: Any = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    """The states of the parts of the run, and further extras, by name."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """The same of rank 0, with the names of tensors that it saves in their places."""

    def to_bytes(self) -> bytes:
        """Return the notes as one line."""
        return json.dumps(vars(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankNotes":
        """Return the notes of a line. Raises `CorruptError`."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            raise CorruptError("the notes of a rank are damaged") from None


def rank_name(rank: int) -> str:
    """Return the name of a rank in extras."""
    return f"rank-{rank:05d}"


def merged(ranks: Sequence[RankNotes], where: Path) -> CheckpointNotes:
    """Return the notes of a checkpoint from those of all ranks, in rank order."""
    first = ranks[0]
    values: dict[str, Mapping[str, Value]] = {}
    for one in ranks:
        for name, own in one.values.items():
            values.setdefault(name, _mapping(own, where))
    parts: dict[str, Any] = {}
    for one in ranks:
        parts = {**one.parts, **parts}  # of a pipeline, each rank has some
    extras: dict[str, Value] = {name: decode(part, where) for name, part in {**parts, **first.named}.items()}
    differing = {
        rank_name(rank): own
        for rank, one in enumerate(ranks)
        if (own := {name: decode(part, where) for name, part in one.parts.items() if parts[name] != part})
    }
    random = {rank_name(rank): decode(one.random_states, where) for rank, one in enumerate(ranks)}
    return CheckpointNotes(
        origin=Origin(first.engine, first.version, first.step, {"world": len(ranks)}),
        groups=tuple(Group(_mapping(options, where), tuple(names)) for options, names in first.groups),
        aliases=dict(first.aliases),
        extras={**extras, **({RANK_PARTS: differing} if differing else {}), RANDOM_STATES: random},
        values=values,
        order=tuple(first.order),
    )


def _mapping(value: Any, where: Path) -> Mapping[str, Value]:
    decoded = decode(value, where)
    if not isinstance(decoded, dict):
        raise CorruptError("the notes of a rank are damaged", where=where)
    return decoded
