"""ZeRO stage 3: every parameter cut over all ranks, the pieces of a sub-group laid end to end on each."""

from collections.abc import Sequence
from math import prod

from ckpt_formats.base import MASTER, Group
from ckpt_formats.deepspeed.partitions import chunk
from ckpt_formats.deepspeed.states import Optimized, options_of, sort_state
from ckpt_formats.deepspeed.tree import get, vector
from ckpt_formats.deepspeed.zero12 import stated_shapes
from ckpt_formats.errors import Corrupt
from ckpt_formats.flat import Piece, tensor_in
from ckpt_formats.geometry import Shape
from ckpt_formats.tensor import Raw, Tensor
from ckpt_formats.torchfile import TorchFile


def read_sub_groups(model: TorchFile, optims: Sequence[TorchFile]) -> Optimized:
    """Masters and optimizer state of one model-parallel rank, from the files of its data-parallel ranks in order."""
    found = Optimized()
    outer = [get(file.root, "optimizer_state_dict", dict, file.path) for file in optims]
    inner = [get(root, "optimizer_state_dict", dict, file.path) for root, file in zip(outer, optims, strict=True)]
    for root, file in zip(outer, optims, strict=True):
        if (count := get(root, "partition_count", int, file.path)) != len(optims):
            raise Corrupt(
                f"the optimizer was cut over {count} ranks, but files of {len(optims)} are here",
                where=file.path,
                hint="Files are missing, or of runs on different numbers of GPUs.",
            )
    sub_groups = stated_shapes(model)
    for s, shapes in enumerate(sub_groups):
        masters = [
            vector(get(get(root, "fp32_flat_groups", list, file.path), s, object, file.path), file.path)
            for root, file in zip(outer, optims, strict=True)
        ]
        states = [get(root, "state", dict, file.path).get(s, {}) for root, file in zip(inner, optims, strict=True)]
        state = sort_state(states, optims)
        vectors = {MASTER: masters} | {
            key: [vector(value, file.path) for value, file in zip(values, optims, strict=True)]
            for key, values in state.vectors.items()
        }
        at = 0
        for name, shape in shapes.items():
            size = chunk(prod(shape), len(optims))
            found.states[name] = {
                **{key: sliced(shape, [v.flat(at, at + size) for v in every]) for key, every in vectors.items()},
                **state.scalars,
            }
            found.values[name] = dict(state.values)
            at += size
        for every in vectors.values():
            for v, file in zip(every, optims, strict=True):
                if v.shape[0] != at:
                    raise Corrupt(
                        f"sub-group {s} holds {v.shape[0]} elements of this rank, its parameters {at}", where=file.path
                    )
    groups = get(inner[0], "param_groups", list, optims[0].path)
    for group in groups:
        listed = group.get("params") if isinstance(group, dict) else None
        members = range(len(sub_groups)) if len(groups) == 1 else listed or ()
        names = tuple(name for s in members for name in get(sub_groups, s, dict, optims[0].path))
        found.groups.append(Group(options_of(group, optims[0].path), names))
    return found


def sliced(shape: Shape, slices: Sequence[Raw]) -> Tensor:
    """A tensor of the equal slices that all ranks hold, the last of them padded."""
    size = slices[0].shape[0]
    return tensor_in(shape, slices[0].dtype, 0, [Piece(rank * size, piece) for rank, piece in enumerate(slices)])
