"""What one more state of a chain would take, told from a few chunks."""

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from ckpt import estimate as alone
from ckpt import sizes as savings
from ckpt.chains.write import DeltaPolicy
from ckpt.executors import run_tasks
from ckpt.pipeline import Resources
from ckpt_cli import work
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.checkpoint import Checkpoint, FilePlan, Goal, Parameter
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Reader
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.delta_format import Delta, delta_base, fitted_to_checkpoint
from ckpt_formats.universal.delta_plan import predicted_ratio

CHUNKS = 8
"""Looked at of each kind of parameter, evenly spread over its elements."""

_PLACE = 500
"""Bytes that a state takes in headers and in the manifest, about."""

Look = tuple[FilePlan, int]
"""A parameter, and an element of it: its chunk is looked at."""


def stored_nbytes(
    source: Checkpoint, earlier: Checkpoint | None, coded: bool, manner: DeltaPolicy, effort: Resources
) -> int:
    """About how many bytes would be stored; `coded` is whether a state without a parent is, by the manner's codec."""
    places = _PLACE * sum(len(parameter.states) for parameter in source.parameters.values())
    if earlier is None and not coded:
        work.load_kernels()
        return savings.total(alone.estimate(source, manner.coding)).stored + places
    goal = Goal(Path(), coding=manner.coding)
    codecs = manner.codecs(source)
    kinds = _spread(Delta(earlier, None, codecs).plan(source, goal))
    work.load_kernels()
    manner = _known(manner, source, earlier, [part.parameters[0] for look in kinds.values() for part, _ in look])
    parts = {part.file: part for part in Delta(earlier, None, manner.codecs(source)).plan(source, goal)}
    looks = [(kind, (parts[part.file], at)) for kind, members in kinds.items() for part, at in members]
    shares: dict[Hashable, list[float]] = {}

    def look(one: tuple[Hashable, Look]) -> tuple[Hashable, float]:
        kind, (part, at) = one
        with Reader(check=False, most_files=effort.files) as reader:
            transfer = Transfer(reader, effort.slab)
            coding = EncodingOptions.of_json(part.what.get("coding")) or EncodingOptions()
            return kind, predicted_ratio(part.parameters[0], delta_base(part, transfer), coding, transfer, at)

    with ThreadPoolExecutor(effort.workers, "ckpt") as pool:
        for kind, share in run_tasks(pool, look, looks, 2 * effort.workers):
            shares.setdefault(kind, []).append(share)
    values = sum(part.parameters[0].nbytes * _mean(shares[_kind(part)]) for part in parts.values() if _size(part))
    return round(values) + places


def _known(manner: DeltaPolicy, source: Checkpoint, earlier: Checkpoint | None, seen: list[Parameter]) -> DeltaPolicy:
    """With what a lossy codec must know of the state, told from what is looked at."""
    if manner.codec.lossless:
        return manner
    own = manner.own(source)
    with Reader(check=False) as reader:
        names = [parameter.name for parameter in seen if parameter.name in own]
        codec: DeltaCodec = fitted_to_checkpoint(manner.codec, names, source, earlier, Transfer(reader))
    return replace(manner, codec=codec)


def _spread(parts: tuple[FilePlan, ...]) -> Mapping[Hashable, list[Look]]:
    """Of each kind, what is to be looked at."""
    kinds: dict[Hashable, list[FilePlan]] = {}
    for part in parts:
        if _size(part):
            kinds.setdefault(_kind(part), []).append(part)
    return {kind: _evenly(members) for kind, members in kinds.items()}


def _evenly(parts: list[FilePlan]) -> list[Look]:
    ends = list(accumulate(map(_size, parts)))
    places = ((2 * i + 1) * ends[-1] // (2 * CHUNKS) for i in range(CHUNKS))
    looks = ((which := bisect_right(ends, at), at - (ends[which] - _size(parts[which]))) for at in places)
    return [(parts[which], at) for which, at in dict.fromkeys(looks)]


def _kind(part: FilePlan) -> Hashable:
    """Parameters of which one tells of the others: the same states, matrices or vectors, with a parent or without."""
    parameter = part.parameters[0]
    states = tuple((state, tensor.dtype.name) for state, tensor in parameter.states.items())
    return parameter.role, states, len(parameter.weight.shape) > 1, len(part.parameters), "delta" in part.what


def _size(part: FilePlan) -> int:
    return part.parameters[0].weight.size


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)
