"""Read the plain optimizer in `model_optim_rng.pt`: PyTorch's state dict with numbered parameters.

    fp32      {'state': {0: {'exp_avg', 'exp_avg_sq', 'step'}}, 'param_groups': [{..., 'params': [0, ...]}]}
    bf16/fp16 {'optimizer': that, 'fp32_from_fp16_params': [[master, ...] for each group], 'grad_scaler'?}

The numbers continue from group to group. Inside a group, parameters are in the module's order, over all chunks. Only
low-precision parameters have masters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.model_chunk import ModelChunk
from ckpt_formats.engines.megatron.shared.optimizer_states import (
    Key,
    OptimizerGroup,
    OptimizerStates,
    members,
    options_of,
)
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf

_MASTERS = ("fp32_from_fp16_params", "fp32_from_float16_params")


def read_plain(
    saved: Value, chunks: Sequence[ModelChunk], experts: bool | None, where: Path, decayed_norms: bool = False
) -> OptimizerStates:
    """The states of one optimizer.

    `experts`: True for the optimizer of the experts, False for that of the other parameters, None for one optimizer of
    all parameters. Raises `CorruptError` or `UnsupportedError` if states and parameters do not match.
    """
    inner = saved.get("optimizer", saved)
    groups = inner["param_groups"]
    keyed_shapes = [
        ((i, n), chunk.tensors[n].shape) for i, chunk in enumerate(chunks) for n in chunk.trained(experts=experts)
    ]
    optimizer = OptimizerStates()
    listed_numbers = {place for group in groups for place in group["params"]}
    if odd := [number for number in inner["state"] if number not in listed_numbers]:
        raise CorruptError(
            f"the optimizer has a state of parameter {str(odd[0])[:20]}, which none of its groups lists",
            where=where,
            hint="Files of several runs may be mixed.",
        )
    listed = next((saved[key] for key in _MASTERS if key in saved), None)
    for number, (group, keys) in enumerate(
        zip(groups, members(groups, keyed_shapes, experts, where, decayed_norms), strict=True)
    ):
        if len(group["params"]) != len(keys):
            raise CorruptError(
                f"group {number} of the optimizer has {len(group['params'])} parameters, "
                f"but the model has {len(keys)} for it",
                where=where,
                hint="Files of several runs may be mixed, or parameters may be frozen.",
            )
        options = options_of(group, where)
        optimizer.groups.append(OptimizerGroup(options, tuple(keys)))
        for key, place in zip(keys, group["params"], strict=True):
            _put(optimizer, key, inner["state"].get(place, {}), chunks, where)
            optimizer.add_step(key, options.get("step"))
        if listed is not None:
            if len(listed) != len(groups):
                raise CorruptError(f"there are masters of {len(listed)} groups, but {len(groups)} groups", where=where)
            _masters(optimizer, keys, listed[number], chunks, where)
    return optimizer


def _put(
    optimizer: OptimizerStates, key: Key, state: Mapping[Value, Value], chunks: Sequence[ModelChunk], where: Path
) -> None:
    optimizer.states[key] = {from_stored(str(k)): tensor_leaf(v) for k, v in state.items() if isinstance(v, Leaf)}
    optimizer.values[key] = {str(k): v for k, v in state.items() if not isinstance(v, Leaf)}
    shape = chunks[key[0]].tensors[key[1]].shape
    for name, tensor in optimizer.states[key].items():
        if tensor.shape not in (shape, ()):
            raise CorruptError(
                f"the state `{name}` for `{key[1]}` has shape {list(tensor.shape)}, but the parameter {list(shape)}",
                where=where,
                hint="Files of several runs may be mixed.",
            )


def _masters(
    optimizer: OptimizerStates, keys: Sequence[Key], listed: Sequence[Value], chunks: Sequence[ModelChunk], where: Path
) -> None:
    low = [key for key in keys if chunks[key[0]].tensors[key[1]].dtype != DTYPES["float32"]]
    if len(listed) != len(low):
        raise CorruptError(f"there are {len(listed)} masters for {len(low)} low-precision parameters", where=where)
    for key, master in zip(low, listed, strict=True):
        tensor = tensor_leaf(master)
        if tensor.shape != chunks[key[0]].tensors[key[1]].shape:
            raise CorruptError(f"the master for `{key[1]}` has shape {list(tensor.shape)}", where=where)
        optimizer.states[key] = {MASTER: tensor, **optimizer.states[key]}
