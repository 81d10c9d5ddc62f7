"""What the files of a plan read of objects in stores, so that it is requested before it is needed."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

from ckpt.pipeline.groups import Group, in_step
from ckpt.pipeline.resources import Resources
from ckpt_formats.core.coming_reads import ObjectRange, object_ranges
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.geometry import slabs
from ckpt_formats.core.prefetch import PlannedReads, Prefetch, joined_ranges
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import Blob, FileBlob, FlatRangeBlob, Tensor

_MAX_ESTIMATED = 10_000
"""Ranges of which the requests are counted before work begins."""
_BLOCK = 8 << 20
"""Bytes of a tensor of which the ranges are computed at once: its slabs are read one after another."""


@dataclass(frozen=True)
class StoreReads:
    """What a piece of work requests from stores, about; headers are read before, and are not in it."""

    nbytes: int
    requests: int


def estimate_reads(files: Sequence[FilePlan], inputs: Iterable[Path], resources: Resources) -> StoreReads | None:
    """What writing these files requests from stores. None if none of the `inputs`, all files that are read, is there.

    No data is read. Of a large plan, a part is computed, and the rest is taken to be alike.
    """
    if not reads_from_stores(inputs):
        return None
    groups, planned = in_step(files, resources.group), sum(file.nbytes for file in files)
    nbytes = requests = done = 0
    sealed = Counter[Seal]()
    for group in groups:
        sources = list(islice(_sources(group), _MAX_ESTIMATED))
        for one in joined_ranges(object_ranges(sources), resources.prefetch, resources.workers):
            nbytes, requests = nbytes + one.nbytes, requests + 1
        done += sum(file.nbytes for file in group)
        if len(sources) == _MAX_ESTIMATED or requests > _MAX_ESTIMATED:
            share = max(1.0, planned / max(1, min(done, nbytes)))
            return StoreReads(round(nbytes * share), math.ceil(requests * share))
        for raw in sources:
            if raw.seal is not None and is_remote(raw.path):
                sealed[raw.seal] += raw.span
    # A checksum is of a whole range, of which the rest is read, too.
    rest = sum(max(0, seal.nbytes - covered) for seal, covered in sealed.items())
    return StoreReads(nbytes + rest, requests + -(-rest // _BLOCK))


def reads_from_stores(files: Iterable[Path]) -> bool:
    """Whether one of the files is in a store."""
    return any(map(is_remote, files))


@contextmanager
def prefetched(
    plan: Sequence[Iterable[ObjectRange]], files: Iterable[Path], resources: Resources
) -> Iterator[Sequence[PlannedReads | None]]:
    """Within, what pieces of work read is requested before; of each piece, its reads. None if no file is in a store.

    `plan`: of each piece, in their order, what it reads, about in the order of reading. `files`: all that are read.
    """
    stores = {file.store: None for file in files if is_remote(file)}
    if not stores:
        yield [None] * len(plan)
        return
    for store in stores:
        store.keep(resources.block_cache // len(stores))
    with Prefetch(plan, resources.prefetch, resources.workers) as prefetch:
        yield prefetch.reads


def ranges_of(group: Group) -> Iterator[ObjectRange]:
    """The ranges that a group reads, about in their order: its files are written in step. No data is read."""
    return object_ranges(_sources(group))


def _sources(group: Group) -> Iterator[FileBlob]:
    return _sources_in_step(map(_blocks, group))


def ranges_together(tensors: Iterable[Tensor]) -> Iterator[ObjectRange]:
    """The ranges of tensors that are read in step, block by block. No data is read."""
    return object_ranges(_sources_in_step(map(_blocks_of, tensors)))


def _sources_in_step(several: Iterable[Iterator[Blob]]) -> Iterator[FileBlob]:
    blocks = chain.from_iterable(zip_longest(*several))
    return chain.from_iterable(block.sources() for block in blocks if block is not None)


def _blocks(file: FilePlan) -> Iterator[Blob]:
    """The values in a file, in blocks."""
    for ranges in file.ranges():
        for tensor, start, stop in zip(ranges.tensors, ranges.starts.tolist(), ranges.stops.tolist(), strict=True):
            if start < stop:
                yield from _blocks_of(tensor if ranges.is_whole else FlatRangeBlob(tensor, start, stop))


def _blocks_of(blob: Blob) -> Iterator[Blob]:
    for box in slabs(blob.shape, max(1, _BLOCK // blob.dtype.itemsize)):
        yield blob if box.shape == blob.shape else blob.crop(box)
