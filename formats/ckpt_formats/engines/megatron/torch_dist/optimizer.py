"""Read the optimizer states of a `torch_dist` checkpoint, in every encoding that Megatron has used.

    plain, fully_reshardable    optimizer.state.<state>.<key of the model>, in the shape of the model's tensor
    fully_sharded_model_space   the same keys; (shards along each axis ..., elements of a shard)
    dp_reshardable, fully_sharded_bucket_space    flat buffers:
        optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_K.<state>
    dp_zero_gather_scatter      an object as in distrib_optim.pt:
        optimizer.distributed.dp_group_idx_G.param_state

With several optimizers (of dense parameters, of experts), keys of the last two encodings begin with `chained_<i>.`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from ckpt_formats.core.checkpoint import MASTER
from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Fragment, Tensor, from_fragments
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import reshaped, unstacked

MASTERS = ("param", "fp32_param")
WRAPPER = "module."
"""The prefix of all keys if the model was saved with its wrapper, as NeMo does."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(fp32_param|param|[^.]+)\.(.+)")
_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(.+)"
)
_OBJECT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.([a-z_]+)/shard_.*")
_OPTIMIZERS = re.compile(r"(?:chained_\d+\.)?optimizer\.")

Group = tuple[int, int]
"""The number of the optimizer, and of the group of ranks that share the same parameters."""


@dataclass
class SplitItems:
    """The tensors and objects of a checkpoint, by kind."""

    model: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By state, then by the model's key."""
    buckets: dict[Group, dict[int, dict[str, dict[int, Tensor]]]] = field(default_factory=dict)
    """By group, number of the buffer, state, number of the bucket; each is (n,)."""
    objects: dict[Group, dict[str, Value]] = field(default_factory=dict)
    """The objects of each group's optimizer, by name: its own state dict, its buffers."""
    other_values: dict[str, Value] = field(default_factory=dict)
    wrapped: bool = False
    """True if the model's keys begin with `WRAPPER`."""

    @property
    def flat(self) -> bool:
        """True if states are stored in flat buffers without names."""
        return bool(self.buckets) or any("param_state" in items for items in self.objects.values())


def split_items(tensors: Mapping[str, Tensor], objects: Mapping[str, Value]) -> SplitItems:
    """The tensors and objects of a checkpoint by kind. Raises `CorruptError` if two keys stand for the same value."""
    items = SplitItems()
    for key, tensor in tensors.items():
        if match := _STATE.fullmatch(key):
            state = MASTER if match[1] in MASTERS else from_stored(match[1])
            name = match[2].removeprefix(WRAPPER)
            if items.states.setdefault(state, {}).setdefault(name, tensor) is not tensor:
                raise CorruptError(f"the state `{state}` of `{printable(name)}` is stored twice")
        elif match := _BUCKET.fullmatch(key):
            group, buffer, bucket = (int(match[1] or 0), int(match[2])), int(match[3]), int(match[5])
            state = "param" if match[6] in MASTERS else match[6]  # as in the buffers of one file
            items.buckets.setdefault(group, {}).setdefault(buffer, {}).setdefault(state, {})[bucket] = tensor
        elif _OPTIMIZERS.match(key):
            items.other_values[key] = tensor  # of an unknown kind, but not of the model
        else:
            items.wrapped = items.wrapped or key.startswith(WRAPPER)
            if items.model.setdefault(key.removeprefix(WRAPPER), tensor) is not tensor:
                raise CorruptError(f"`{printable(key)}` is stored twice")
    for key, value in objects.items():
        if match := _OBJECT.fullmatch(key):
            items.objects.setdefault((int(match[1] or 0), int(match[2])), {})[match[3]] = value
        else:
            items.other_values[key.removeprefix(WRAPPER)] = value
    return items


def unflattened(key: str, flat: Tensor, shape: Shape) -> Tensor:
    """A state in the shape of the model's tensor, from its flattened shards.

    `flat`: (shards along each axis ..., elements of a shard). Raises `CorruptError` if the shapes do not fit.
    """
    counts = flat.shape[:-1]
    if len(counts) != len(shape) or any(n < 1 or m % n for n, m in zip(counts, shape, strict=True)):
        raise CorruptError(f"a state of `{printable(key)}` has shape {list(flat.shape)}, the tensor {list(shape)}")
    local = tuple(m // n for n, m in zip(counts, shape, strict=True))
    if prod(local) != flat.shape[-1] or prod(counts) > MAX_NUMBER:
        raise CorruptError(f"a state of `{printable(key)}` has shape {list(flat.shape)}, its shards {list(local)}")
    by_place: dict[Shape, list[Fragment]] = {}
    for fragment in flat.fragments:
        # Megatron saves each rank's part of one shard: all axes but the last have length 1.
        if fragment.box.shape[:-1] != (1,) * len(counts):
            raise CorruptError(f"a state of `{printable(key)}` has a block {fragment.box} of several shards")
        run = Box(fragment.box.start[-1:], fragment.box.stop[-1:])
        blob = Tensor.of(fragment.blob)
        for _ in counts:
            blob = unstacked(blob, 0)
        by_place.setdefault(fragment.box.start[:-1], []).append(Fragment(run, blob.fragments[0].blob))
    parts: list[Fragment] = []
    for place, fragments in by_place.items():
        shard = reshaped(Tensor(flat.shape[-1:], flat.dtype, tuple(fragments)), 0, local)
        corner = tuple(i * n for i, n in zip(place, local, strict=True))
        parts += (Fragment(fragment.box.shift(corner), fragment.blob) for fragment in shard.fragments)
    return from_fragments(shape, parts, flat.dtype)
