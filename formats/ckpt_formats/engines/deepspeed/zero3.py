"""Read ZeRO stage 3: every parameter is split over all ranks; a rank stores its slices of a sub-group in one vector."""

from collections.abc import Sequence
from math import prod

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.checkpoint import MASTER, Group
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.flat_partitions import FlatPiece, even_tensor, tensor_in
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.engines.deepspeed.flat_partitions import chunk
from ckpt_formats.engines.deepspeed.lookups import get, vector
from ckpt_formats.engines.deepspeed.optimizer_states import (
    ELEMENTWISE,
    OptimizerStates,
    check_count,
    check_options,
    options_of,
    split_state,
)
from ckpt_formats.engines.deepspeed.zero12 import stated_shapes
from ckpt_formats.state_dicts.statements import MIXED


def read_sub_groups(model: TorchFile, optims: Sequence[TorchFile]) -> OptimizerStates:
    """The optimizer states of one model-parallel rank, from the files of its data-parallel ranks in order.

    Raises `CorruptError` if the files contradict each other or the shapes in `model`.
    """
    optimizer = OptimizerStates()
    outer = [get(file.root, "optimizer_state_dict", dict, file.path) for file in optims]
    inner = [get(root, "optimizer_state_dict", dict, file.path) for root, file in zip(outer, optims, strict=True)]
    for root, file in zip(outer, optims, strict=True):
        if (count := get(root, "partition_count", int, file.path)) != len(optims):
            raise CorruptError(
                f"the optimizer was split over {count} ranks, but files of {len(optims)} are here",
                where=file.path,
                hint="Files are missing, or they are from runs on different numbers of GPUs.",
            )
    sub_groups = stated_shapes(model)
    for root, file in zip(outer, optims, strict=True):
        check_count("masters", len(get(root, "fp32_flat_groups", list, file.path)), len(sub_groups), file)
    for root, file in zip(inner, optims, strict=True):
        unknown = next((key for key in get(root, "state", dict, file.path) if key not in range(len(sub_groups))), None)
        if unknown is not None:
            raise CorruptError(
                f"the optimizer has a state of sub-group {str(unknown)[:20]}, "
                f"but `param_shapes` lists {len(sub_groups)}",
                where=file.path,
                hint=MIXED,
            )
    for s, shapes in enumerate(sub_groups):
        masters = tuple(
            vector(get(get(root, "fp32_flat_groups", list, file.path), s, object, file.path), file.path)
            for root, file in zip(outer, optims, strict=True)
        )
        states = [get(root, "state", dict, file.path).get(s, {}) for root, file in zip(inner, optims, strict=True)]
        state = split_state(states, optims)
        length = sum(chunk(prod(shape), len(optims)) for shape in shapes.values())
        vectors = {MASTER: masters}
        for key, values in state.vectors.items():
            per_rank = tuple(vector(value, file.path) for value, file in zip(values, optims, strict=True))
            if key not in ELEMENTWISE and any(v.shape[0] != length for v in per_rank):
                for value, file in zip(values, optims, strict=True):
                    optimizer.unplaced.setdefault(file.path, {})[f"{s}.{to_stored(key)}"] = value
            else:
                vectors[key] = per_rank
        of_one_type = {key for key, by_rank in vectors.items() if len({v.dtype for v in by_rank}) == 1}
        at = 0
        for name, shape in shapes.items():
            size = chunk(prod(shape), len(optims))
            optimizer.states[name] = {
                **{
                    key: even_tensor(shape, by_rank, at, size)
                    if key in of_one_type
                    else from_slices(shape, [v.flat(at, at + size) for v in by_rank])
                    for key, by_rank in vectors.items()
                },
                **state.scalars,
            }
            optimizer.values[name] = dict(state.values)
            at += size
        for by_rank in vectors.values():
            for v, file in zip(by_rank, optims, strict=True):
                if v.shape[0] != at:
                    raise CorruptError(
                        f"sub-group {s} has {v.shape[0]} elements on this rank, but its parameters {at}",
                        where=file.path,
                    )
    groups = get(inner[0], "param_groups", list, optims[0].path)
    listed_groups = [get(root, "param_groups", list, file.path) for root, file in zip(inner, optims, strict=True)]
    for g in range(max(map(len, listed_groups))):
        options = [
            options_of(get(listed, g, dict, file.path), file.path)
            for listed, file in zip(listed_groups, optims, strict=True)
        ]
        check_options(options, optims, g)
    for group in groups:
        listed = group.get("params") if isinstance(group, dict) else None
        members = range(len(sub_groups)) if len(groups) == 1 else listed or ()
        names = tuple(name for s in members for name in get(sub_groups, s, dict, optims[0].path))
        optimizer.groups.append(Group(options_of(group, optims[0].path), names))
    return optimizer


def from_slices(shape: Shape, slices: Sequence[FileBlob]) -> Tensor:
    """A tensor of this shape from the slices of all ranks, (n,) each, with padding after the last element."""
    size = slices[0].shape[0]
    if all((part.shape, part.dtype) == (slices[0].shape, slices[0].dtype) for part in slices):
        return even_tensor(shape, tuple(slices), 0, size)
    return tensor_in(shape, slices[0].dtype, 0, [FlatPiece(rank * size, part) for rank, part in enumerate(slices)])
