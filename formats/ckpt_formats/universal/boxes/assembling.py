"""Make a checkpoint of the packs of all ranks: the index, and the manifest, which is written last."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Group, Origin
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError
from ckpt_formats.core.publish import flush
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.version import WRITTEN_BY
from ckpt_formats.universal import columns, manifest
from ckpt_formats.universal.boxes.check_table import check_boxes, first_gap_or_overlap
from ckpt_formats.universal.boxes.receipt import PackReceipt
from ckpt_formats.universal.boxes.table import BoxPlace, table_of
from ckpt_formats.universal.check_index import check as check_index
from ckpt_formats.universal.entry import ParameterEntry
from ckpt_formats.universal.index import METADATA, index_of
from ckpt_formats.universal.manifest import Manifest, Parent, pack_path

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
    folder: Path, receipts: Sequence[PackReceipt], notes: CheckpointNotes, parent: Parent | None = None
) -> Manifest:
    """Write the index and the manifest of a checkpoint whose packs are all in `folder`, and flush them.

    `parent`: the checkpoint of the save before, if packs have deltas. To publish the folder, by renaming it, is the
    caller's part. Raises `IncompleteError` if a pack is missing, or boxes do not have all elements of a state exactly
    once; `InvalidArgumentError` for receipts of several saves, or a group or alias of an unknown parameter.
    """
    receipts = _of_one_save(folder, receipts)
    rows: dict[str, list[tuple[BoxPlace, ParameterEntry]]] = {name: [] for name in notes.order}
    for receipt in receipts:
        for (name, place), entry in zip(receipt.places, receipt.entries, strict=True):
            rows.setdefault(name, []).append((place, replace(entry, values=notes.values.get(name, {}))))
    for name, own in rows.items():
        _check_whole(name, own, folder)
    named = {*(name for group in notes.groups for name in group.names), *notes.aliases.values(), *notes.values}
    if unknown := sorted(named - rows.keys()):
        raise InvalidArgumentError(f"no rank has a box of `{printable(unknown[0])}`, which the notes name")
    table = table_of(list(rows), [(number, place) for number, own in enumerate(rows.values()) for place, _ in own])
    entries = index_of(entry for own in rows.values() for _, entry in own)
    packs = tuple(receipt.pack for receipt in receipts)
    path = folder / manifest.NAME
    check_index(entries, packs, path)
    check_boxes(table, entries, path)
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
    _write(folder, result)
    return result


def _of_one_save(folder: Path, receipts: Sequence[PackReceipt]) -> list[PackReceipt]:
    """The receipts by number, with all packs there. Raises as `assemble`."""
    in_order = sorted(receipts, key=lambda receipt: receipt.number)
    saves = {receipt.save for receipt in in_order}
    if len(saves) != 1:
        raise InvalidArgumentError(f"receipts of {len(saves)} saves, not of one", where=str(folder))
    numbers = [receipt.number for receipt in in_order]
    if numbers != list(range(len(numbers))):
        raise IncompleteError(f"receipts of the packs {numbers}, which are not all from 0 on", where=folder, hint=_HINT)
    for receipt in in_order:
        pack = pack_path(folder, receipt.number)
        if not pack.is_file() or pack.stat().st_size != receipt.pack.nbytes:
            raise IncompleteError("the pack is not as its receipt states", where=pack)
    return in_order


def _check_whole(name: str, own: Sequence[tuple[BoxPlace, ParameterEntry]], folder: Path) -> None:
    if not own:
        raise IncompleteError(f"no rank has a box of `{printable(name)}`", where=folder, hint=_HINT)
    for state in dict.fromkeys(state for _, entry in own for state in entry.states):
        problem = first_gap_or_overlap([place for place, entry in own if state in entry.states])
        if problem is not None:
            raise IncompleteError(f"`{printable(name)}` {printable(state)}: {problem}", where=folder, hint=_HINT)


def _write(folder: Path, result: Manifest) -> None:
    assert result.boxes is not None
    data = columns.dump({**result.entries.columns, **result.boxes.columns}, METADATA)
    (folder / manifest.INDEX).write_bytes(data)
    draft = folder / f"{manifest.NAME}.tmp"
    draft.write_bytes(manifest.dump(result, data, None))
    flush(folder / manifest.INDEX)
    flush(draft)
    os.replace(draft, folder / manifest.NAME)
    flush(folder / "packs")
    flush(folder)
