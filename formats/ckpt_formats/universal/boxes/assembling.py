"""Make a checkpoint of the packs of all ranks: the index, and the manifest, which is written last."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Group, Origin
from ckpt_formats.core.errors import CorruptError, IncompleteError, InvalidArgumentError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.publish import flush
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.version import WRITTEN_BY
from ckpt_formats.universal import columns, manifest
from ckpt_formats.universal.boxes.check_table import NOT_VALID, check_boxes
from ckpt_formats.universal.boxes.receipt import PackReceipt
from ckpt_formats.universal.boxes.table import table_of
from ckpt_formats.universal.check_index import check as check_index
from ckpt_formats.universal.index import METADATA, Index, join, reordered
from ckpt_formats.universal.manifest import Manifest, Parent, pack_path
from ckpt_formats.universal.tables import Tables

_HINT = "Each rank adds a receipt, and its boxes are those of the run: together, all elements of each state, once."


@dataclass(frozen=True)
class CheckpointNotes:
    """Everything of a checkpoint that is no tensor."""

    origin: Origin
    groups: tuple[Group, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Value] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """The optimizer's values that are no tensors (`{"step": 5}`), by parameter."""
    order: Sequence[str] = ()
    """The names of the parameters in the order of the model; others follow in the order of the receipts."""


def assemble(
    folder: Path,
    receipts: Sequence[PackReceipt],
    notes: CheckpointNotes,
    parent: Parent | None = None,
    *,
    packs_elsewhere: bool = False,
) -> Manifest:
    """Write the index and the manifest of a checkpoint whose packs are all in `folder`, and flush them.

    `packs_elsewhere`: the packs are in a store, and the caller compares their sizes with the receipts.
    `parent`: the checkpoint of the save before, if packs have deltas. To publish the folder, by renaming it, is the
    caller's part. Raises `IncompleteError` if a pack is missing, or boxes do not have all elements of a state exactly
    once; `InvalidArgumentError` for receipts of several saves, or a group or alias of an unknown parameter;
    `OutputError` if the files cannot be written.
    """
    receipts = _of_one_save(folder, receipts, packs_elsewhere)
    boxes = [box for receipt in receipts for box in receipt.places]
    names = list(dict.fromkeys([*notes.order, *(name for name, _ in boxes)]))
    numbers = {name: number for number, name in enumerate(names)}
    _check_names(names, {name for name, _ in boxes}, notes, folder)
    owners = np.array([numbers[name] for name, _ in boxes], np.int64)
    order = np.argsort(owners, kind="stable")
    table = table_of(names, [(int(owners[row]), boxes[row][1]) for row in order.tolist()])
    joined = reordered(join([receipt.entries for receipt in receipts]), order)
    entries = _with_values(joined, [notes.values.get(name, {}) for name in names], owners[order])
    packs = tuple(receipt.pack for receipt in receipts)
    try:
        check_boxes(table, entries, folder)
    except CorruptError as error:
        what = error.what.removeprefix(f"{NOT_VALID}: ")
        raise IncompleteError(what, where=folder, hint=_HINT) from None
    check_index(entries, packs, folder)
    result = Manifest(
        notes.origin,
        entries,
        packs,
        tuple(notes.groups),
        notes.aliases,
        notes.extras,
        WRITTEN_BY,
        boxes=table,
    )
    if result.with_deltas():
        if parent is None:
            raise InvalidArgumentError("packs have deltas, and no parent is given")
        result = replace(result, parent=parent)
    try:
        _write(folder, result)
    except OSError as error:
        raise unwritable(error, folder) from error
    return result


def _of_one_save(folder: Path, receipts: Sequence[PackReceipt], packs_elsewhere: bool) -> list[PackReceipt]:
    """The receipts by number, with all packs there. Raises as `assemble`."""
    in_order = sorted(receipts, key=lambda receipt: receipt.number)
    saves = {receipt.save for receipt in in_order}
    if len(saves) != 1:
        raise InvalidArgumentError(f"receipts of {len(saves)} saves, not of one", where=str(folder))
    numbers = [receipt.number for receipt in in_order]
    if numbers != list(range(len(numbers))):
        raise IncompleteError(f"receipts of the packs {numbers}, which are not all from 0 on", where=folder, hint=_HINT)
    for receipt in () if packs_elsewhere else in_order:
        pack = pack_path(folder, receipt.number)
        if not pack.is_file() or pack.stat().st_size != receipt.pack.nbytes:
            raise IncompleteError("the pack is not as its receipt states", where=pack)
    return in_order


def _check_names(names: Sequence[str], saved: Collection[str], notes: CheckpointNotes, folder: Path) -> None:
    missing = next((name for name in names if name not in saved), None)
    if missing is not None:
        raise IncompleteError(f"no rank has a box of `{printable(missing)}`", where=folder, hint=_HINT)
    named = {*(name for group in notes.groups for name in group.names), *notes.aliases.values(), *notes.values}
    if unknown := sorted(named - set(saved)):
        raise InvalidArgumentError(f"no rank has a box of `{printable(unknown[0])}`, which the notes name")


def _with_values(boxes: Index, values: Sequence[Mapping[str, Value]], owners: Array) -> Index:
    """The boxes with the values of their parameters. `owners`: the number of the parameter of each, (boxes,) int64."""
    texts = {Tables.text({}): 0}
    numbers = np.array([texts.setdefault(Tables.text(encode(dict(own))), len(texts)) for own in values], "<u4")
    tables = replace(boxes.tables, values=tuple(map(Tables.mapping, texts)))
    return Index({**boxes.columns, "parameter.values": numbers[owners]}, tables)


def _write(folder: Path, result: Manifest) -> None:
    assert result.boxes is not None
    data = columns.dump({**result.entries.columns, **result.boxes.columns}, METADATA)
    (folder / manifest.INDEX).write_bytes(data)
    draft = folder / f"{manifest.NAME}.tmp"
    draft.write_bytes(manifest.dump(result, data, None))
    flush(folder / manifest.INDEX)
    flush(draft)
    os.replace(draft, folder / manifest.NAME)
    with suppress(FileNotFoundError):  # the packs are in a store
        flush(folder / "packs")
    flush(folder)
