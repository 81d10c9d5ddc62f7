"""What the files of a plan read of objects in stores, so that it is requested before it is needed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path

from ckpt.pipeline.groups import Group
from ckpt.pipeline.resources import Resources
from ckpt_formats.core.coming_reads import object_ranges
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.geometry import slabs
from ckpt_formats.core.prefetch import ObjectRange, PlannedReads, Prefetch
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.tensor import Blob, FlatRangeBlob

_BLOCK = 8 << 20
"""Bytes of a tensor of which the ranges are computed at once: its slabs are read one after another."""


def reads_from_stores(files: Iterable[Path]) -> bool:
    """Whether one of the files is in a store."""
    return any(isinstance(file, StorePath) for file in files)


@contextmanager
def prefetched(
    groups: Sequence[Group], files: Iterable[Path], resources: Resources
) -> Iterator[Sequence[PlannedReads | None]]:
    """Within, what each group reads is requested before; of each group, its reads. None if no file is in a store.

    `files`: all that are read.
    """
    stores = {file.store: None for file in files if isinstance(file, StorePath)}
    if not stores:
        yield [None] * len(groups)
        return
    for store in stores:
        store.keep(resources.kept_blocks // len(stores))
    with Prefetch([ranges_of(group) for group in groups], resources.prefetch, resources.workers) as prefetch:
        yield prefetch.reads


def ranges_of(group: Group) -> Iterator[ObjectRange]:
    """The ranges that a group reads, about in their order: its files are written in step. No data is read."""
    in_step = chain.from_iterable(zip_longest(*map(_blocks, group)))
    return object_ranges(block for block in in_step if block is not None)


def _blocks(file: FilePlan) -> Iterator[Blob]:
    """The values in a file, in blocks."""
    for ranges in file.ranges():
        for tensor, start, stop in zip(ranges.tensors, ranges.starts.tolist(), ranges.stops.tolist(), strict=True):
            if start < stop:
                yield from _blocks_of(tensor if ranges.is_whole else FlatRangeBlob(tensor, start, stop))


def _blocks_of(blob: Blob) -> Iterator[Blob]:
    for box in slabs(blob.shape, max(1, _BLOCK // blob.dtype.itemsize)):
        yield blob if box.shape == blob.shape else blob.crop(box)
