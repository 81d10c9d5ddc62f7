"""Estimate from a few chunks how many bytes one more state of a chain takes."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

from ckpt import sizes as savings
from ckpt.chains.write import DeltaPolicy
from ckpt.job import load_kernels
from ckpt.pipeline import Execution
from ckpt.pipeline.executors import run_tasks
from ckpt.sizes import estimate as alone
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Reader
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.delta_format import Delta, delta_base, fitted_to_checkpoint
from ckpt_formats.universal.delta_plan import predicted_ratio

CHUNKS = 8
"""Chunks that are sampled of each kind of parameter, evenly spread over its elements."""

_OVERHEAD = 500
"""About how many bytes a state takes in headers and in the manifest."""

Sample = tuple[Parameter, int]
"""A parameter, and the number of an element: the chunk of this element is sampled."""


def stored_nbytes(
    source: Checkpoint, earlier: Checkpoint | None, coded: bool, policy: DeltaPolicy, resources: Execution
) -> int:
    """About how many bytes would be stored; `coded`: whether a state without a parent gets the policy's codec."""
    overhead = _OVERHEAD * sum(len(parameter.states) for parameter in source.parameters.values())
    if earlier is None and not coded:
        load_kernels()
        return savings.total(alone.estimate(source, EncodingOptions(check=policy.check))).stored + overhead
    draft = Delta(earlier=earlier, delta_codecs=policy.codecs(source), check=policy.check)
    draft.plan(source)  # raises for jobs that cannot succeed

    def kind_of(parameter: Parameter) -> Hashable:
        delta = draft.delta(parameter, source)
        return _kind(parameter), delta is None, delta is not None and delta.earlier is not None

    kinds = _spread(source.parameters.values(), kind_of)
    load_kernels()
    policy = _fitted(policy, source, earlier, [parameter for members in kinds.values() for parameter, _ in members])
    fitted = Delta(earlier=earlier, delta_codecs=policy.codecs(source), check=policy.check)
    samples = [(kind, sample) for kind, members in kinds.items() for sample in members]
    shares: dict[Hashable, list[float]] = {}

    def predict(sample: tuple[Hashable, Sample]) -> tuple[Hashable, float]:
        kind, (parameter, at) = sample
        with Reader(check=False, max_files=resources.files) as reader:
            transfer = Transfer(reader, resources.slab)
            delta = fitted.delta(parameter, source)
            base = None if delta is None else delta_base(parameter, delta, transfer)
            return kind, predicted_ratio(parameter, base, EncodingOptions(check=policy.check), transfer, at)

    with ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        for kind, share in run_tasks(pool, predict, samples, 2 * resources.workers):
            shares.setdefault(kind, []).append(share)
    sized = (parameter for parameter in source.parameters.values() if parameter.weight.size)
    values = sum(parameter.nbytes * _mean(shares[kind_of(parameter)]) for parameter in sized)
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


def _spread(
    parameters: Iterable[Parameter], kind_of: Callable[[Parameter], Hashable]
) -> Mapping[Hashable, list[Sample]]:
    """The samples of each kind."""
    kinds: dict[Hashable, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.weight.size:
            kinds.setdefault(kind_of(parameter), []).append(parameter)
    return {kind: sample_evenly(members) for kind, members in kinds.items()}


def sample_evenly(members: list[Parameter]) -> list[Sample]:
    """Return at most `CHUNKS` places, evenly spread over all values of the parameters: each and a flat index in it."""
    sizes = [parameter.weight.size for parameter in members]
    ends = list(accumulate(sizes))
    places = ((2 * i + 1) * ends[-1] // (2 * CHUNKS) for i in range(CHUNKS))
    samples = ((which := bisect_right(ends, at), at - (ends[which] - sizes[which])) for at in places)
    return [(members[which], at) for which, at in dict.fromkeys(samples)]


def _kind(parameter: Parameter) -> Hashable:
    """A key of parameters that compress alike: the same states, matrices or vectors."""
    states = tuple((state, tensor.dtype.name) for state, tensor in parameter.states.items())
    return parameter.role, states, len(parameter.weight.shape) > 1


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)
