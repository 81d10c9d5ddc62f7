"""Estimate from a few chunks how many bytes one more state of a chain takes."""

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

from ckpt import estimate as alone
from ckpt import sizes as savings
from ckpt.chains.write import DeltaPolicy
from ckpt.job import load_kernels
from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal import StatesContent
from ckpt_formats.universal.delta_format import Delta, delta_base, fitted_to_checkpoint
from ckpt_formats.universal.delta_plan import predicted_ratio

CHUNKS = 8
"""Chunks that are sampled of each kind of parameter, evenly spread over its elements."""

_OVERHEAD = 500
"""About how many bytes a state takes in headers and in the manifest."""

Sample = tuple[FilePlan, int]
"""A parameter, and the number of an element: the chunk of this element is sampled."""


def stored_nbytes(
    source: Checkpoint, earlier: Checkpoint | None, coded: bool, policy: DeltaPolicy, resources: Resources
) -> int:
    """About how many bytes would be stored; `coded`: whether a state without a parent gets the policy's codec."""
    overhead = _OVERHEAD * sum(len(parameter.states) for parameter in source.parameters.values())
    if earlier is None and not coded:
        load_kernels()
        return savings.total(alone.estimate(source, policy.encoding)).stored + overhead
    draft = Delta(earlier=earlier, delta_codecs=policy.codecs(source), check=policy.check).plan(source)
    kinds = _spread(draft.files)
    load_kernels()
    policy = _fitted(policy, source, earlier, [part.parameters[0] for members in kinds.values() for part, _ in members])
    fitted = Delta(earlier=earlier, delta_codecs=policy.codecs(source), check=policy.check).plan(source)
    parts = {part.file: part for part in fitted.files}
    samples = [(kind, (parts[part.file], at)) for kind, members in kinds.items() for part, at in members]
    shares: dict[Hashable, list[float]] = {}

    def predict(sample: tuple[Hashable, Sample]) -> tuple[Hashable, float]:
        kind, (part, at) = sample
        with Reader(check=False, max_files=resources.files) as reader:
            transfer = Transfer(reader, resources.slab)
            base = delta_base(part, transfer)
            return kind, predicted_ratio(part.parameters[0], base, policy.encoding, transfer, at)

    with ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        for kind, share in run_tasks(pool, predict, samples, 2 * resources.workers):
            shares.setdefault(kind, []).append(share)
    values = sum(part.parameters[0].nbytes * _mean(shares[_kind(part)]) for part in parts.values() if _size(part))
    return round(values) + overhead


def _fitted(
    policy: DeltaPolicy, source: Checkpoint, earlier: Checkpoint | None, sampled: list[Parameter]
) -> DeltaPolicy:
    """The policy, with a lossy codec fitted to the parameters that are sampled."""
    if policy.delta_codec.lossless:
        return policy
    own = policy.lossy_parameters(source)
    with Reader(check=False) as reader:
        names = [parameter.name for parameter in sampled if parameter.name in own]
        codec: DeltaCodec = fitted_to_checkpoint(policy.delta_codec, names, source, earlier, Transfer(reader))
    return replace(policy, codec=codec)


def _spread(parts: tuple[FilePlan, ...]) -> Mapping[Hashable, list[Sample]]:
    """The samples of each kind."""
    kinds: dict[Hashable, list[FilePlan]] = {}
    for part in parts:
        if _size(part):
            kinds.setdefault(_kind(part), []).append(part)
    return {kind: _evenly(members) for kind, members in kinds.items()}


def _evenly(parts: list[FilePlan]) -> list[Sample]:
    ends = list(accumulate(map(_size, parts)))
    places = ((2 * i + 1) * ends[-1] // (2 * CHUNKS) for i in range(CHUNKS))
    samples = ((which := bisect_right(ends, at), at - (ends[which] - _size(parts[which]))) for at in places)
    return [(parts[which], at) for which, at in dict.fromkeys(samples)]


def _kind(part: FilePlan) -> Hashable:
    """A key of parameters that compress alike: the same states, matrices or vectors, with a parent or without."""
    parameter = part.parameters[0]
    states = tuple((state, tensor.dtype.name) for state, tensor in parameter.states.items())
    return parameter.role, states, len(parameter.weight.shape) > 1, len(part.parameters), _has_delta(part)


def _has_delta(part: FilePlan) -> bool:
    return isinstance(part.content, StatesContent) and part.content.codec is not None


def _size(part: FilePlan) -> int:
    return part.parameters[0].weight.size


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)
