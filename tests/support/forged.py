"""Universal checkpoints changed as an attacker would who can compute all checksums: nothing but the change is wrong."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load_file, save

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.core.checkpoint import Group
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.boxes import table
from ckpt_formats.universal.boxes.table import BoxTable
from ckpt_formats.universal.content import content_id
from ckpt_formats.universal.index import TYPES, Index
from ckpt_formats.universal.tables import Tables


@dataclass
class Forged:
    """The manifest and the index of a universal checkpoint, to be changed."""

    fields: dict[str, Any]
    """The manifest without its checksum."""
    columns: dict[str, Array]
    """The columns of the index, by the names that docs/format.md gives them."""

    @property
    def names(self) -> list[str]:
        ends = self.columns["parameter.ends"].tolist()
        blob = self.columns["parameter.names"].tobytes()
        return [blob[a:b].decode("utf-8", "surrogatepass") for a, b in zip([0, *ends], ends, strict=False)]

    def row(self, parameter: str, state: str) -> int:
        """The row of a state."""
        number, name = self.names.index(parameter), self.fields["states"].index(state)
        rows = (self.columns["state.parameter"] == number) & (self.columns["state.name"] == name)
        (row,) = np.flatnonzero(rows).tolist()
        return int(row)

    def dims(self, parameter: str, state: str) -> slice:
        """Where the sizes of a state are in their column."""
        row = self.row(parameter, state)
        begin = int(self.columns["state.rank"][:row].sum())
        return slice(begin, begin + int(self.columns["state.rank"][row]))

    def chunks(self, parameter: str, state: str) -> slice:
        """Where the checksums of a state's values are in their column."""
        row, counts = self.row(parameter, state), Index(self.columns, Tables()).chunk_counts
        begin = int(counts[:row].sum())
        return slice(begin, begin + int(counts[row]))

    def coded(self, parameter: str, state: str) -> slice:
        """Where the coded chunks of a state are in their columns."""
        row, counts = self.row(parameter, state), Index(self.columns, Tables()).chunk_counts
        counts = np.where(self.columns["state.storage"] == 1, counts, 0)
        begin = int(counts[:row].sum())
        return slice(begin, begin + int(counts[row]))


Change = Callable[[Forged], object]


def forge(folder: Path, change: Change = lambda forged: None) -> None:
    """Change the manifest and the index of a checkpoint, with the right lengths, checksums and content id.

    What the change itself has set of these is kept, and so is the old content id where none can be computed.
    """
    path, index = folder / "manifest.json", folder / "index.safetensors"
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    forged = Forged(fields, {name: column.copy() for name, column in load_file(index).items()})
    before, index_before = fields["content"], dict(fields["index"])
    assert _content(forged) == before
    change(forged)
    data = save({name: np.ascontiguousarray(column) for name, column in forged.columns.items()})
    index.write_bytes(data)
    if forged.fields.get("index") == index_before:
        forged.fields["index"] = {"nbytes": len(data), "checksum": f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"}
    with suppress(Exception):
        if forged.fields["content"] == before:
            forged.fields["content"] = _content(forged)
    path.write_bytes(signed(forged.fields))


def signed(fields: Any) -> bytes:
    """A manifest of any JSON with the right checksum."""
    body = json.dumps(fields, indent=1).encode().removeprefix(b"{\n") + b"\n"
    return b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body


def _content(forged: Forged) -> str:
    fields, check = forged.fields, FieldReader(Path("manifest.json"))
    index = Index({name: forged.columns[name] for name in TYPES}, Tables.of_json(fields, check))
    boxes = BoxTable({name: forged.columns[name] for name in table.TYPES}) if "box.whole" in forged.columns else None
    names = index.names if boxes is None else boxes.names
    groups = [
        Group(check.values(group, "options"), tuple(n for a, b in group["parameters"] for n in names[a : a + b]))
        for group in fields["groups"]
    ]
    return content_id(index, groups, fields["aliases"], check.values(fields, "extras"), boxes)


def put(*keys: Any, value: Any) -> Change:
    """Set a field of the manifest."""

    def change(forged: Forged) -> None:
        inner: Any = forged.fields
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def drop(*keys: Any) -> Change:
    """Take a field out of the manifest."""

    def change(forged: Forged) -> None:
        inner: Any = forged.fields
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return change


def number(column: str, row: int | tuple[str, str], value: int) -> Change:
    """Set one number of a column. `row`: the number of a row, or a parameter and its state."""

    def change(forged: Forged) -> None:
        at = forged.row(*row) if isinstance(row, tuple) else row
        forged.columns[column][at] = value

    return change


def codec(parameter: str, state: str, config: Any, base: str | None = None) -> Change:
    """Give a state a codec that is new in the table."""

    def change(forged: Forged) -> None:
        forged.fields["codecs"].append({"codec": config, "base": base})
        forged.columns["state.codec"][forged.row(parameter, state)] = len(forged.fields["codecs"]) - 1

    return change


def both(*changes: Change) -> Change:
    """Several changes, one after another."""

    def change(forged: Forged) -> None:
        for one in changes:
            one(forged)

    return change
