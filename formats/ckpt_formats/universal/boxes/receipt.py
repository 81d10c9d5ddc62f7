"""What the process of a rank hands over when its pack is written: what the index needs, as JSON and columns."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.universal import columns
from ckpt_formats.universal.boxes import table
from ckpt_formats.universal.boxes.table import BoxPlace, BoxTable, table_of
from ckpt_formats.universal.check_index import Pack
from ckpt_formats.universal.index import METADATA, TYPES, Index
from ckpt_formats.universal.tables import Tables

_KIND = "ckpt-boxes-of-a-rank"


@dataclass(frozen=True, eq=False)
class PackReceipt:
    """The pack of a rank: its boxes, and how they are stored. No values."""

    save: str
    """What all ranks of one save have in common."""
    number: int
    pack: Pack
    places: tuple[tuple[str, BoxPlace], ...]
    """Of each box, the name of the parameter, and its elements."""
    entries: Index
    """The boxes, in the same order."""

    @property
    def nbytes(self) -> int:
        """The bytes of the pack."""
        return self.pack.nbytes

    def to_bytes(self) -> bytes:
        """The receipt as bytes: the length of a JSON text, the text, and columns."""
        names = list(dict.fromkeys(name for name, _ in self.places))
        numbers = {name: number for number, name in enumerate(names)}
        of_boxes = table_of(names, [(numbers[name], place) for name, place in self.places])
        fields = {
            "format": _KIND,
            "save": self.save,
            "number": self.number,
            "pack": [self.pack.nbytes, self.pack.header_nbytes, self.pack.header],
            **self.entries.tables.to_json(),
        }
        text = json.dumps(fields).encode()
        data = columns.dump({**self.entries.columns, **of_boxes.columns}, METADATA)
        return b"".join([len(text).to_bytes(8, "little"), text, data])

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> "PackReceipt":
        """The receipt in bytes that came from `where`. Raises `CorruptError`."""
        nbytes = int.from_bytes(data[:8], "little")
        try:
            fields = json.loads(data[8 : 8 + nbytes])
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or fields.get("format") != _KIND:
            raise CorruptError("not the receipt of a pack", where=where)
        check = FieldReader(where)
        nbytes_of_pack, header_nbytes, header = check.sequence(fields, "pack")
        stored = columns.load(data[8 + nbytes :], {**TYPES, **table.TYPES}, where)
        entries = Index({name: stored[name] for name in TYPES}, Tables.of_json(fields, check))
        boxes = BoxTable({name: stored[name] for name in table.TYPES})
        places = tuple(
            (boxes.names[owner], boxes.place(row, shape))
            for row, (owner, shape) in enumerate(zip(boxes.owners, _shapes(entries), strict=True))
        )
        pack = Pack(nbytes_of_pack, header_nbytes, header)
        return cls(check.text(fields, "save"), check.natural(fields, "number"), pack, places, entries)


def _shapes(entries: Index) -> Iterator[Shape]:
    """The shape of the values of each box."""
    columns = entries.columns
    ranks = columns["state.rank"].astype(np.int64)
    first = np.searchsorted(columns["state.parameter"], np.arange(len(entries)))
    begins = (np.cumsum(ranks) - ranks)[first]
    dims = columns["state.dims"].tolist()
    for begin, rank in zip(begins.tolist(), ranks[first].tolist(), strict=True):
        yield tuple(dims[begin : begin + rank])
