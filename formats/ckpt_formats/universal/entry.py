"""An entry of the manifest: one parameter, its file, and where in it its states are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, get_args

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import ErrorFigures, Role
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Value
from ckpt_formats.universal.chunked import ENTRY, MOST_ELEMENTS

MOST_JOINT = 64 << 20
"""Bytes of a chunk of all states that a delta holds."""
_FILE = re.compile(r"(parameters|extras)/[a-z0-9][a-z0-9._-]{0,110}\.safetensors")
_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


@dataclass(frozen=True)
class StateEntry:
    """One tensor: what it is, and where its bytes are. `offset` is None where it has none, or a delta has them."""

    dtype: str
    shape: Shape
    values: str
    codec: Mapping[str, Any] | None = None
    base: str | None = None
    offset: int | None = None
    nbytes: int = 0
    stored: str | None = None
    chunk: Shape | None = None
    """Of a state whose bytes are coded: how many rows and columns, or elements, a chunk has."""
    loss: ErrorFigures | None = None
    """What is promised and what was measured of values that are not those once saved; None if they are."""


@dataclass(frozen=True)
class DeltaEntry:
    """Several states of one parameter, coded together against the same states of the parent."""

    codec: Mapping[str, Any]
    states: tuple[str, ...]
    before: tuple[str, ...]
    """The states of the parent that the codec was given; none, where it needs no parent."""
    chunk: Shape
    offset: int
    nbytes: int
    stored: str


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter: its file, and its states by name."""

    name: str
    role: Role
    file: str
    nbytes: int
    header: str
    states: Mapping[str, StateEntry]
    values: Mapping[str, Value] = field(default_factory=dict)
    delta: DeltaEntry | None = None

    @property
    def version(self) -> int:
        """Of the format: the lowest that has what this entry has."""
        if self.delta is not None:
            return 3
        return 2 if any(state.chunk is not None for state in self.states.values()) else 1

    @property
    def begins(self) -> int:
        """Where the header ends and the first stored bytes begin."""
        return min(offset for offset, _ in self.ranges())

    def ranges(self) -> list[tuple[int, int]]:
        """Offset and length of all that is stored, in the order of the file."""
        stored = [(state.offset, state.nbytes) for state in self.states.values() if state.offset is not None]
        if self.delta is not None:
            stored.append((self.delta.offset, self.delta.nbytes))
        return sorted(stored)


def entry_json(entry: ParameterEntry) -> dict[str, Any]:
    """An entry as JSON: its form in the manifest and in receipts."""
    said = {
        "name": entry.name,
        "role": entry.role,
        "file": entry.file,
        "nbytes": entry.nbytes,
        "header": entry.header,
        "states": {name: _state_json(state) for name, state in entry.states.items()},
        "values": encode(entry.values) if entry.values else {},
    }
    if entry.delta is not None:
        delta = entry.delta
        said["delta"] = {
            "codec": encode(delta.codec),
            "states": list(delta.states),
            "before": list(delta.before),
            "chunk": list(delta.chunk),
            "offset": delta.offset,
            "nbytes": delta.nbytes,
            "stored": delta.stored,
        }
    return said


def entry_of(said: Any, path: Path) -> ParameterEntry:
    """Read an entry back. Raises `Corrupt`."""
    check = FieldReader(path)
    name, role, file = (check.text(said, key) for key in ("name", "role", "file"))
    check.true(role in _ROLES, f"role {role!r}")
    check.true(_FILE.fullmatch(file) is not None, f"file name {file!r:.100}")
    delta = None if said.get("delta") is None else _delta(check.mapping(said, "delta"), check)
    inside = () if delta is None else delta.states
    states = {str(key): _state(value, key in inside, check) for key, value in check.mapping(said, "states").items()}
    check.true(bool(states), f"`{name}` has no state")
    for key, state in states.items():
        if state.base is not None:
            base = states.get(state.base)
            fits = base is not None and base.base is None and base.shape == state.shape and state.codec is not None
            # What is stored alone is read alone: only what is derived, element by element, may lean on a delta.
            check.true(
                fits and (state.offset is None or state.base not in inside),
                f"`{name}`: the base of {key!r} is {state.base!r}",
            )
    if delta is not None:
        _check_delta(name, delta, states, check)
    nbytes, header = check.natural(said, "nbytes"), check.hash(said, "header")
    entry = ParameterEntry(name, _ROLES[role], file, nbytes, header, states, check.values(said, "values"), delta)
    ranges = entry.ranges()
    ends = [ranges[0][0], *(offset + length for offset, length in ranges)]
    check.true(
        [*(offset for offset, _ in ranges), nbytes] == ends, f"`{name}`: its states are not its file, one by one"
    )
    return entry


def _state_json(state: StateEntry) -> dict[str, Any]:
    said: dict[str, Any] = {"dtype": state.dtype, "shape": list(state.shape), "codec": state.codec}
    if state.base is not None:
        said["base"] = state.base
    if state.offset is not None:
        said |= {"offset": state.offset, "nbytes": state.nbytes, "stored": state.stored}
    if state.chunk is not None:
        said["chunk"] = list(state.chunk)
    if state.loss is not None:
        said["loss"] = encode(state.loss)
    return said | {"values": state.values}


def _state(said: Any, in_delta: bool, check: FieldReader) -> StateEntry:
    shape = tuple(check.sequence(said, "shape"))
    check.true(len(shape) <= 64 and all(map(is_natural, shape)), f"shape {shape!r:.80}")
    dtype = check.text(said, "dtype")
    check.true(dtype in DTYPES, f"element type {dtype!r}")
    codec, base = said.get("codec"), said.get("base")
    check.true(codec is None or (isinstance(codec, dict) and isinstance(codec.get("name"), str)), "codec")
    check.true(base is None or isinstance(base, str), "base")
    loss = None if said.get("loss") is None else check.values(said, "loss")
    values = check.hash(said, "values")
    if in_delta:
        check.true(codec is None and base is None and "offset" not in said, "a state is in a delta and elsewhere")
        return StateEntry(dtype, shape, values, loss=loss)
    if "offset" not in said:
        check.true(codec is not None and base is not None, "a state without bytes needs a codec and a base")
        return StateEntry(dtype, shape, values, codec, base, loss=loss)
    nbytes = check.natural(said, "nbytes")
    offset, stored = check.natural(said, "offset"), check.hash(said, "stored")
    if codec is None:
        check.true(nbytes == prod(shape) * DTYPES[dtype].itemsize, f"{nbytes} bytes for shape {list(shape)} of {dtype}")
        return StateEntry(dtype, shape, values, codec, base, offset, nbytes, stored, loss=loss)
    if "chunk" not in said:
        raise Unsupported(f"a state is stored with the codec {codec['name']!r:.40}, without chunks", where=check.path)
    chunk = _chunk(said, check)
    _check_chunks(chunk, shape, nbytes, check)
    return StateEntry(dtype, shape, values, codec, base, offset, nbytes, stored, chunk, loss)


def _chunk(said: Any, check: FieldReader) -> Shape:
    chunk = tuple(check.sequence(said, "chunk"))
    sane = len(chunk) in (1, 2) and all(is_natural(n) and n for n in chunk) and prod(chunk) <= MOST_ELEMENTS
    check.true(sane, f"chunk {chunk!r:.80}")
    return chunk


def _check_chunks(chunk: Shape, shape: Shape, nbytes: int, check: FieldReader) -> None:
    check.true(prod(shape) % chunk[-1] == 0 or len(chunk) == 1, f"chunk {list(chunk)} for shape {list(shape)}")
    count = Chunking(shape, chunk).count
    check.true(count * ENTRY.itemsize <= nbytes, f"{nbytes} bytes for {count} chunks")


def _delta(said: Any, check: FieldReader) -> DeltaEntry:
    codec = check.values(said, "codec")
    check.true(isinstance(codec.get("name"), str), "codec of a delta")
    states, before = (check.texts(check.sequence(said, key), key) for key in ("states", "before"))
    natural_numbers = (check.natural(said, "offset"), check.natural(said, "nbytes"))
    return DeltaEntry(codec, states, before, _chunk(said, check), *natural_numbers, check.hash(said, "stored"))


def _check_delta(name: str, delta: DeltaEntry, states: Mapping[str, StateEntry], check: FieldReader) -> None:
    inside = [states[key] for key in delta.states if key in states]
    sane = 0 < len(inside) == len(set(delta.states)) == len(delta.states) and set(delta.before) <= set(delta.states)
    check.true(sane, f"`{name}`: the states of its delta are not its states")
    shape = inside[0].shape
    check.true(all(state.shape == shape for state in inside), f"`{name}`: the states of its delta differ in shape")
    _check_chunks(delta.chunk, shape, delta.nbytes, check)
    joint = prod(delta.chunk) * sum(DTYPES[state.dtype].itemsize for state in inside)
    check.true(joint <= MOST_JOINT, f"`{name}`: a chunk of its delta has {joint:,} bytes")
