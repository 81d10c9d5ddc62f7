"""The headers of packs, compared with the index: other readers of safetensors use the header, ckpt uses the index."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.containers.sealed_json import hash_text
from ckpt_formats.core.claims import MAX_HEADER
from ckpt_formats.core.dtypes import SAFETENSORS_TAGS
from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seals import Contradiction
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.text import printable
from ckpt_formats.universal.entry import DELTA
from ckpt_formats.universal.index import CODED, DERIVED
from ckpt_formats.universal.manifest import VERSION, Manifest
from ckpt_formats.universal.single_file import is_single

_OWN = "ckpt."
"""The entries of a single file that are no states begin so."""


@dataclass(frozen=True)
class SlotNames:
    """Names in the header, each once. They are for other readers: ckpt takes names from the index."""

    used: set[str] = field(default_factory=set)

    def add(self, parameter: str, state: str) -> str:
        """The name of a state."""
        text = f"{parameter}/{to_stored(state)}"
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()
        while text in self.used:
            text += "_"
        self.used.add(text)
        return text


def contradictions(checkpoint: Path, stated: Manifest) -> Iterator[Contradiction]:
    """The first entry of each pack that says otherwise than the index, of the checkpoint at a path.

    A header that does not fit its checksum is not looked at: that is damage, which its seal tells.
    """
    files, slots = stated.files(checkpoint), _Slots(stated)
    with Reader(check=False) as reader:
        for number, pack in enumerate(stated.packs):
            path = files.path(number)
            if pack.header_nbytes > MAX_HEADER:
                what = f"the header has {pack.header_nbytes:,} bytes, more than readers of safetensors accept"
                yield Contradiction(path, what)
                continue
            raw = bytearray(pack.header_nbytes)
            try:
                reader.read_into(path, 0, memoryview(raw))
            except CkptError:
                continue  # which its seal tells, too
            if hash_text(xxhash.xxh3_128_intdigest(raw)) != pack.header:
                continue
            own = slots.of(number)
            contradiction = None if _are_all(own, raw) else _parsed(path, raw, own, pack.owner is None)
            if contradiction is not None:
                yield contradiction


class _Slots:
    """The entries that the headers of packs must have. They are made pack by pack."""

    def __init__(self, stated: Manifest) -> None:
        self._stated = stated
        columns = stated.entries.columns
        self._rows = np.flatnonzero(columns["state.storage"] < DERIVED)
        """The states that are stored; deltas have the numbers after them."""
        self._parameter, pack, self._offset, self._nbytes = (
            np.concatenate([columns[f"state.{key}"][self._rows], columns[f"delta.{key}"]]).astype(np.int64)
            for key in ("parameter", "pack", "offset", "nbytes")
        )
        is_delta = np.arange(len(pack)) >= len(self._rows)
        self._order = np.lexsort((is_delta, self._parameter, pack))  # a delta comes after the states of its parameter
        self._first = np.searchsorted(pack[self._order], np.arange(len(stated.packs) + 1)).tolist()
        self._ends = np.cumsum(columns["state.rank"], dtype=np.int64)

    def of(self, number: int) -> list["_Slot"]:
        """Those of a pack, by offset."""
        index, own = self._stated.entries, self._order[self._first[number] : self._first[number + 1]]
        columns, tables, used = index.columns, index.tables, SlotNames()
        states = own[own < len(self._rows)]
        rows = self._rows[states]
        stops, ranks = self._ends[rows], columns["state.rank"][rows].astype(np.int64)
        facts = zip(
            (stops - ranks).tolist(),
            stops.tolist(),
            columns["state.name"][rows].tolist(),
            columns["state.dtype"][rows].tolist(),
            (columns["state.storage"][rows] == CODED).tolist(),
            strict=True,
        )
        of_state = dict(zip(states.tolist(), facts, strict=True))
        begins = self._offset[own] - self._stated.packs[number].header_nbytes
        places = zip(
            own.tolist(), self._parameter[own].tolist(), begins.tolist(), self._nbytes[own].tolist(), strict=True
        )
        dims, slots = columns["state.dims"], list[_Slot]()
        for row, owner, begin, nbytes in places:
            parameter = index.names[owner]
            fact = of_state.get(row)
            if fact is None:
                name, tag, shape = used.add(parameter, DELTA), "U8", [nbytes]
            else:
                start, stop, state, dtype, is_coded = fact
                name = used.add(parameter, tables.states[state])
                tag = "U8" if is_coded else SAFETENSORS_TAGS[tables.dtypes[dtype]]
                shape = [nbytes] if is_coded else dims[start:stop].tolist()
            slots.append((name, tag, shape, begin, begin + nbytes, parameter))
        return sorted(slots, key=lambda slot: slot[3:5])


_Slot = tuple[str, str, list[int], int, int, str]
"""The name of an entry, its type and shape, where its bytes begin and end behind the header, and the parameter."""


def _are_all(slots: list[_Slot], header: bytearray) -> bool:
    """Whether a header is the one that `ckpt` writes for these entries. Then it need not be parsed."""
    text = "".join(
        f',{json.dumps(name)}:{{"dtype":"{tag}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'
        for name, tag, shape, begin, end, _ in slots
    )
    expected, length = f'{{"__metadata__":{{"ckpt":"universal {VERSION}"}}{text}}}'.encode(), len(header) - 8
    return bytes(header) == length.to_bytes(8, "little") + expected.ljust(length)


def _parsed(path: Path, raw: bytearray, slots: list[_Slot], is_own: bool) -> Contradiction | None:
    """The first entry of a header that is missing, wrong or unknown.

    A pack that is not `is_own` is of an earlier member: it has entries of that, too, and names as they are there.
    """
    if int.from_bytes(raw[:8], "little") != len(raw) - 8:
        return Contradiction(path, "the header has another length than the manifest states")
    try:
        header = parse_json_object(bytes(raw[8:]), path)
    except CorruptError as error:
        return Contradiction(path, f"the header is not valid: {error.what}")
    entries = [
        (name, {"dtype": tag, "shape": shape, "data_offsets": [begin, end]}, parameter)
        for name, tag, shape, begin, end, parameter in slots
    ]
    missing = [(name, entry, parameter) for name, entry, parameter in entries if header.get(name) != entry]
    if missing and not is_own:
        texts = {_text(entry) for entry in header.values()}
        missing = [one for one in missing if _text(one[1]) not in texts]
    for name, entry, parameter in missing:
        what = "is missing" if name not in header else f"is {header[name]!s:.200}, in the index {entry}"
        return Contradiction(path, f"the entry `{printable(name)}` of the header {what}", parameter)
    others = header.keys() - {name for name, _, _ in entries} - {"__metadata__"} if is_own else set()
    others = {name for name in others if not (is_single(path) and name.startswith(_OWN))}
    if others:
        return Contradiction(path, f"the header has an entry `{printable(min(others))}`, which the index does not have")
    return None


def _text(entry: Any) -> str:
    """Equal for entries that say the same."""
    return str(sorted(entry.items())) if isinstance(entry, dict) else ""
