"""Packs of earlier members of a chain in which states of a checkpoint lie."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.distinct import distinct
from ckpt_formats.universal.check_index import Pack
from ckpt_formats.universal.index import Index
from ckpt_formats.universal.manifest import Manifest, runs
from ckpt_formats.universal.stored import StoredSeals

if TYPE_CHECKING:
    from ckpt_formats.universal.chain.chain_file import SharedPacks

FIRST = 1 << 31
"""Packs of an earlier member have numbers from this on until all packs of the new member are written."""


def with_packs(index: Index, own: Sequence[Pack], earlier: Sequence[Pack]) -> tuple[Index, tuple[Pack, ...]]:
    """The index with the final numbers of packs of the earlier member, and all packs: the own ones come first."""
    column = index.columns["state.pack"]
    used = distinct(column[column >= FIRST])
    if not len(used):
        return index, tuple(own)
    final = column.copy()
    rows = column >= FIRST
    final[rows] = len(own) + np.searchsorted(used, column[rows]).astype(column.dtype)
    packs = tuple(earlier[number - FIRST] for number in used.tolist())
    return Index({**index.columns, "state.pack": final}, index.tables), (*own, *packs)


def shared_packs(stated: Manifest) -> "tuple[SharedPacks, ...]":
    """The packs of earlier members that a manifest names, by folder, and the bytes of the states that lie in them."""
    if all(pack.owner is None for pack in stated.packs):
        return ()
    from ckpt_formats.universal.chain.chain_file import SharedPacks  # only members of chains share packs

    columns, own = stated.entries.columns, len(stated.own_packs)
    rows = columns["state.pack"] >= own
    sizes = np.bincount(columns["state.pack"][rows], columns["state.nbytes"][rows], len(stated.packs)).astype(np.int64)
    by_folder: dict[str, dict[int, int]] = {}
    for pack, nbytes in zip(stated.packs, sizes.tolist(), strict=True):
        if pack.owner is not None:
            by_folder.setdefault(pack.owner.folder, {})[pack.owner.number] = nbytes
    return tuple(
        SharedPacks(folder, tuple((first, count) for first, count in runs(sorted(packs))), sum(packs.values()))
        for folder, packs in sorted(by_folder.items())
    )


def manifest_of(checkpoint: Checkpoint) -> Manifest | None:
    """The manifest of a checkpoint that was read in the universal format; None for others."""
    return checkpoint.seals.checkpoints[-1][1] if isinstance(checkpoint.seals, StoredSeals) else None


def shared_packs_of(checkpoint: Checkpoint) -> "tuple[SharedPacks, ...]":
    """The packs of earlier members in which states of a checkpoint lie. Those of its ancestors are not among them."""
    stated = manifest_of(checkpoint)
    return () if stated is None else shared_packs(stated)
