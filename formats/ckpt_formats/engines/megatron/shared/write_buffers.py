"""Write `distrib_optim.pt`: the distributed optimizer's buffers in a new layout. Inverse of `distributed_optimizer`."""

from collections.abc import Mapping, Sequence

from ckpt_formats.core.checkpoint import MASTER, MODEL
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Value
from ckpt_formats.core.views import flat_vector
from ckpt_formats.engines.megatron.shared.buffers import ALIGNMENTS, BufferLayout, fill
from ckpt_formats.engines.megatron.shared.distributed_optimizer import Buffer, buckets_of, buffers_of
from ckpt_formats.engines.megatron.shared.model_chunk import ModelChunk
from ckpt_formats.engines.megatron.shared.split import LocalParameter
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout

STATES = ("param", "exp_avg", "exp_avg_sq")
"""The states of the distributed optimizer: a file can have no others."""
_FLOAT = DTYPES["float32"]

Chunks = Sequence[Sequence[LocalParameter]]
"""The trained parameters of each model chunk of a rank, in the order of its module."""


def buffers_file(target: WriteLayout, chunks: Chunks, stage: int, experts: bool | None) -> dict[Value, Value]:
    """The content of the file for one optimizer of a rank.

    `experts`: True for the optimizer of the experts, False for that of the other parameters, None for one optimizer of
    all parameters. Raises `UnsupportedError` if a state is missing or is not float32.
    """
    modules = [ModelChunk({parameter.local: parameter.states[MODEL] for parameter in chunk}, {}) for chunk in chunks]
    dp = target.parallel.expert_dp if experts else target.parallel.dp
    buckets = buckets_of(target.args, target.parallel, stage, dp, sum(module.numel for module in modules))
    by_name = [{parameter.local: parameter for parameter in chunk} for chunk in chunks]
    buffers: dict[Value, Value] = {"buckets_coalesced": True}
    for number, buffer in enumerate(buffers_of(modules, buckets.shared, experts)):
        filled = fill(buffer.items, buckets.limits(buffer.chunk)[0], ALIGNMENTS[0])
        states = {state: _flat(by_name[buffer.chunk], buffer, filled, state) for state in STATES}
        dtype = by_name[buffer.chunk][buffer.items[0].name].states[MODEL].dtype.name
        dtypes = (Global("torch", dtype), Global("torch", _gradients(target, dtype)))
        buffers[number] = {dtypes: {**states, "numel_unpadded": sum(filled.buckets)}}
    return buffers


def _gradients(target: WriteLayout, dtype: str) -> str:
    """The name of the gradients' dtype, a part of the buffer's key. For bfloat16 weights the default is float32."""
    in_fp32 = target.args.record.get("accumulate_allreduce_grads_in_fp32")
    return "float32" if in_fp32 or (in_fp32 is None and dtype == "bfloat16") else dtype


def _flat(by_name: Mapping[str, LocalParameter], buffer: Buffer, filled: BufferLayout, state: str) -> Tensor:
    """One state of all parameters of a buffer: (n,) float32, the concatenated buckets, with zeros as padding."""
    by_start = sorted((start, name) for name, start in filled.flat().items())
    states = [(_state(by_name[name], state), start) for start, name in by_start]
    parts = [(tensor, 0, tensor.size, start) for tensor, start in states if tensor.size]
    return flat_vector(parts, sum(filled.buckets), _FLOAT)


def _state(parameter: LocalParameter, state: str) -> Tensor:
    """A state of a parameter, float32. The master of a float32 parameter is the parameter itself.

    Raises `UnsupportedError` if the state is missing, or has another shape or dtype.
    """
    tensor = parameter.states.get(MASTER, parameter.states[MODEL]) if state == "param" else parameter.states.get(state)
    if tensor is None or tensor.shape != parameter.states[MODEL].shape or tensor.dtype != _FLOAT:
        actual = "is missing" if tensor is None else f"has dtype {tensor.dtype.name} and shape {list(tensor.shape)}"
        raise UnsupportedError(
            f"the state `{MASTER if state == 'param' else state}` of `{printable(parameter.name)}` {actual}",
            hint="Megatron's distributed optimizer stores Adam's moments and masters in fp32: try --zero 0.",
        )
    return tensor
