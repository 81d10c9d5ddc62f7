"""The part of a checkpoint that is checked if the rest is left out."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.seals import Seal


def part_to_check(source: Checkpoint, only: Sequence[str], skip: Sequence[str]) -> Checkpoint:
    """The parameters that `Checkpoint.select` chooses, with the checksums of ranges that hold values of theirs.

    The checksums of headers, and of values that are left out, are no part of it. Raises `NoMatchError`.
    """
    part = source.select(only, skip)
    names = part.parameters.keys()
    return replace(
        part,
        seals=tuple(_seals_of(part, source.seals)),
        digests={key: digest for key, digest in source.digests.items() if key[0] in names},
        errors={key: error for key, error in source.errors.items() if key[0] in names},
    )


def _seals_of(part: Checkpoint, seals: Sequence[Seal]) -> Iterator[Seal]:
    """The seals whose range overlaps one from which a tensor is read."""
    ranges: dict[Path, list[tuple[int, int]]] = {}
    for _, _, tensor in part.tensors():
        for raw in (raw for copy in (tensor, *tensor.replicas) for raw in copy.sources()):
            ranges.setdefault(raw.path, []).append((raw.offset, raw.offset + raw.span))
    for own in ranges.values():
        own.sort()
    stops = {path: list(accumulate((stop for _, stop in own), max)) for path, own in ranges.items()}
    for seal in seals:
        if seal.path not in ranges:
            continue
        # Of the ranges that begin before the end of the seal, the one that ends last must end behind its start.
        before = bisect_left(ranges[seal.path], (seal.offset + seal.nbytes,))
        if before and stops[seal.path][before - 1] > seal.offset:
            yield seal
