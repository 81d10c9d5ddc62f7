"""An entry of the manifest: one parameter, its file, and the places of its states in the file."""

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
from ckpt_formats.universal.earlier_forms import earlier_form

MAX_DELTA_CHUNK_NBYTES = 64 << 20
"""Limit of the bytes that one chunk of a delta has when it is decoded: the sum over all its states."""
_FILE = re.compile(r"(parameters|extras)/[a-z0-9][a-z0-9._-]{0,110}\.safetensors")
_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


@dataclass(frozen=True)
class StateEntry:
    """One tensor: its type and shape, and the place of its bytes.

    `offset` is None if no bytes are stored for it, or if a delta stores them.
    """

    dtype: str
    shape: Shape
    values: str
    codec: Mapping[str, Any] | None = None
    base: str | None = None
    offset: int | None = None
    nbytes: int = 0
    stored: str | None = None
    chunk: Shape | None = None
    """Of a coded state: the rows and columns, or the elements, of a chunk."""
    error: ErrorFigures | None = None
    """What is promised and what was measured, if the values differ from those that were to be saved; else None."""


@dataclass(frozen=True)
class DeltaEntry:
    """Several states of one parameter, encoded together against states of the parent."""

    codec: Mapping[str, Any]
    states: tuple[str, ...]
    parent_states: tuple[str, ...]
    """The states of the parent that the codec is given; empty if it needs no parent."""
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
    def header_nbytes(self) -> int:
        """The length of the header: the offset of the first stored byte."""
        return min(offset for offset, _ in self.ranges())

    def ranges(self) -> list[tuple[int, int]]:
        """Offset and length of everything that is stored, in the order of the file."""
        stored = [(state.offset, state.nbytes) for state in self.states.values() if state.offset is not None]
        if self.delta is not None:
            stored.append((self.delta.offset, self.delta.nbytes))
        return sorted(stored)


def entry_json(entry: ParameterEntry) -> dict[str, Any]:
    """An entry as JSON, as manifests and receipts have it."""
    fields = {
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
        fields["delta"] = {
            "codec": encode(delta.codec),
            "states": list(delta.states),
            "parent_states": list(delta.parent_states),
            "chunk": list(delta.chunk),
            "offset": delta.offset,
            "nbytes": delta.nbytes,
            "stored": delta.stored,
        }
    return fields


def entry_of(fields: Any, path: Path) -> ParameterEntry:
    """The entry from its JSON in the file `path`.

    Raises `Corrupt`, `Unsupported` for an earlier form.
    """
    check = FieldReader(path)
    name, role, file = (check.text(fields, key) for key in ("name", "role", "file"))
    check.true(role in _ROLES, f"role {role!r}")
    check.true(_FILE.fullmatch(file) is not None, f"file name {file!r:.100}")
    delta = None if fields.get("delta") is None else _delta(check.mapping(fields, "delta"), check)
    in_delta = () if delta is None else delta.states
    states = {str(key): _state(value, key in in_delta, check) for key, value in check.mapping(fields, "states").items()}
    check.true(bool(states), f"`{name}` has no state")
    for key, state in states.items():
        if state.base is not None:
            base = states.get(state.base)
            fits = base is not None and base.base is None and base.shape == state.shape and state.codec is not None
            # A state that is stored alone is read without the delta. Only a derived state may have a base in the delta.
            check.true(
                fits and (state.offset is None or state.base not in in_delta),
                f"`{name}`: the base of {key!r} is {state.base!r}",
            )
    if delta is not None:
        _check_delta(name, delta, states, check)
    nbytes, header = check.natural(fields, "nbytes"), check.hash(fields, "header")
    entry = ParameterEntry(name, _ROLES[role], file, nbytes, header, states, check.values(fields, "values"), delta)
    ranges = entry.ranges()
    ends = [ranges[0][0], *(offset + length for offset, length in ranges)]
    check.true(
        [*(offset for offset, _ in ranges), nbytes] == ends,
        f"`{name}`: its states do not follow one another up to the end of its file",
    )
    return entry


def _state_json(state: StateEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {"dtype": state.dtype, "shape": list(state.shape), "codec": state.codec}
    if state.base is not None:
        fields["base"] = state.base
    if state.offset is not None:
        fields |= {"offset": state.offset, "nbytes": state.nbytes, "stored": state.stored}
    if state.chunk is not None:
        fields["chunk"] = list(state.chunk)
    if state.error is not None:
        fields["error"] = encode(state.error)
    return fields | {"values": state.values}


def _state(fields: Any, in_delta: bool, check: FieldReader) -> StateEntry:
    shape = tuple(check.sequence(fields, "shape"))
    check.true(len(shape) <= 64 and all(map(is_natural, shape)), f"shape {shape!r:.80}")
    if "loss" in fields:
        raise earlier_form(check.path)
    dtype = check.text(fields, "dtype")
    check.true(dtype in DTYPES, f"element type {dtype!r}")
    codec, base = fields.get("codec"), fields.get("base")
    check.true(codec is None or (isinstance(codec, dict) and isinstance(codec.get("name"), str)), "codec")
    check.true(base is None or isinstance(base, str), "base")
    error = None if fields.get("error") is None else check.values(fields, "error")
    values = check.hash(fields, "values")
    if in_delta:
        check.true(codec is None and base is None and "offset" not in fields, "a state is in a delta and elsewhere")
        return StateEntry(dtype, shape, values, error=error)
    if "offset" not in fields:
        check.true(codec is not None and base is not None, "a state without bytes needs a codec and a base")
        return StateEntry(dtype, shape, values, codec, base, error=error)
    nbytes = check.natural(fields, "nbytes")
    offset, stored = check.natural(fields, "offset"), check.hash(fields, "stored")
    if codec is None:
        check.true(nbytes == prod(shape) * DTYPES[dtype].itemsize, f"{nbytes} bytes for shape {list(shape)} of {dtype}")
        return StateEntry(dtype, shape, values, codec, base, offset, nbytes, stored, error=error)
    if "chunk" not in fields:
        raise Unsupported(f"a state is stored with the codec {codec['name']!r:.40}, without chunks", where=check.path)
    chunk = _chunk(fields, check)
    _check_chunks(chunk, shape, nbytes, check)
    return StateEntry(dtype, shape, values, codec, base, offset, nbytes, stored, chunk, error)


def _chunk(fields: Any, check: FieldReader) -> Shape:
    chunk = tuple(check.sequence(fields, "chunk"))
    is_valid = len(chunk) in (1, 2) and all(is_natural(n) and n for n in chunk) and prod(chunk) <= MOST_ELEMENTS
    check.true(is_valid, f"chunk {chunk!r:.80}")
    return chunk


def _check_chunks(chunk: Shape, shape: Shape, nbytes: int, check: FieldReader) -> None:
    check.true(prod(shape) % chunk[-1] == 0 or len(chunk) == 1, f"chunk {list(chunk)} for shape {list(shape)}")
    count = Chunking(shape, chunk).count
    check.true(count * ENTRY.itemsize <= nbytes, f"{nbytes} bytes for {count} chunks")


def _delta(fields: Any, check: FieldReader) -> DeltaEntry:
    codec = check.values(fields, "codec")
    check.true(isinstance(codec.get("name"), str), "codec of a delta")
    states, parent_states = (check.texts(check.sequence(fields, key), key) for key in ("states", "parent_states"))
    offset, nbytes = check.natural(fields, "offset"), check.natural(fields, "nbytes")
    return DeltaEntry(codec, states, parent_states, _chunk(fields, check), offset, nbytes, check.hash(fields, "stored"))


def _check_delta(name: str, delta: DeltaEntry, states: Mapping[str, StateEntry], check: FieldReader) -> None:
    in_delta = [states[key] for key in delta.states if key in states]
    is_valid = 0 < len(in_delta) == len(set(delta.states)) == len(delta.states)
    is_valid &= set(delta.parent_states) <= set(delta.states)
    check.true(is_valid, f"`{name}`: the states of its delta are not its states")
    shape = in_delta[0].shape
    check.true(all(state.shape == shape for state in in_delta), f"`{name}`: the states of its delta differ in shape")
    _check_chunks(delta.chunk, shape, delta.nbytes, check)
    chunk_nbytes = prod(delta.chunk) * sum(DTYPES[state.dtype].itemsize for state in in_delta)
    check.true(chunk_nbytes <= MAX_DELTA_CHUNK_NBYTES, f"`{name}`: a chunk of its delta has {chunk_nbytes:,} bytes")
