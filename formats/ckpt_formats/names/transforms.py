"""Transforms from one Megatron tensor to Hugging Face tensors, and back: views that only move elements.

Megatron stores queries, keys and values in one matrix, group of heads by group: all queries of the group, its key, its
value. Feed-forward layers with a gate store the rows of the gate, then those of the up projection. Tables of the
vocabulary have padding rows at the end. Sources: Megatron core, `SelfAttention.get_query_key_value_tensors`;
Megatron-Bridge, `split_qkv_weights`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.views import concatenated, padded, rows_of, transposed


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that transforms need."""

    heads: int
    groups: int
    """The number of groups of heads that share a key and a value."""
    vocabulary: int
    padded_vocabulary: int | None = None
    """The number of rows with padding; None: no padding."""


@dataclass(frozen=True)
class Transform:
    """A reversible change of shape. Both functions raise `UnsupportedError` for unsuitable shapes."""

    count: int
    """The number of Hugging Face tensors that one Megatron tensor contains."""
    split: Callable[[Tensor, ModelSizes], tuple[Tensor, ...]]
    join: Callable[[Sequence[Tensor], ModelSizes], Tensor]


def _same(tensor: Tensor, sizes: ModelSizes) -> tuple[Tensor, ...]:
    return (tensor,)


def _qkv(tensor: Tensor, sizes: ModelSizes) -> tuple[Tensor, ...]:
    """The queries (heads * width, ...), keys and values (groups * width, ...) of a fused matrix or bias."""
    each = sizes.heads // sizes.groups if sizes.groups and sizes.heads % sizes.groups == 0 else 0
    if not each or not tensor.shape or tensor.shape[0] % (sizes.groups * (each + 2)):
        raise UnsupportedError(
            f"{tensor.shape[:1]} rows are not queries, keys and values of {sizes.heads} heads in {sizes.groups} groups"
        )
    width = tensor.shape[0] // (sizes.groups * (each + 2))
    group = width * (each + 2)
    cuts = (0, width * each, width * (each + 1), group)
    return tuple(
        rows_of(tensor, [(g * group + start, g * group + stop) for g in range(sizes.groups)])
        for start, stop in pairwise(cuts)
    )


def _fused_qkv(tensors: Sequence[Tensor], sizes: ModelSizes) -> Tensor:
    q, k, v = tensors
    uneven = any(not tensor.shape or tensor.shape[0] % max(sizes.groups, 1) for tensor in tensors)
    if uneven or k.shape != v.shape or q.shape[0] * sizes.groups != k.shape[0] * sizes.heads:
        raise UnsupportedError(
            f"shapes {[list(t.shape) for t in tensors]} are not of {sizes.heads} heads in {sizes.groups} groups"
        )
    return concatenated(
        [
            rows_of(tensor, [(g * step, (g + 1) * step)])
            for g in range(sizes.groups)
            for tensor, step in ((tensor, tensor.shape[0] // sizes.groups) for tensor in (q, k, v))
        ]
    )


def _split_halves(tensor: Tensor, sizes: ModelSizes) -> tuple[Tensor, ...]:
    if not tensor.shape or tensor.shape[0] % 2:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be divided into two halves")
    half = tensor.shape[0] // 2
    return rows_of(tensor, [(0, half)]), rows_of(tensor, [(half, 2 * half)])


def _join_halves(tensors: Sequence[Tensor], sizes: ModelSizes) -> Tensor:
    if tensors[0].shape != tensors[1].shape:
        raise UnsupportedError(f"shapes {[list(tensor.shape) for tensor in tensors]} are not those of two halves")
    return concatenated(tensors)


def _equal_parts(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    if not tensor.shape or tensor.shape[0] % count:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be divided into {count} equal parts")
    step = tensor.shape[0] // count
    return tuple(rows_of(tensor, [(i * step, (i + 1) * step)]) for i in range(count))


def _true_rows(tensor: Tensor, sizes: ModelSizes) -> tuple[Tensor, ...]:
    if not tensor.shape or tensor.shape[0] < sizes.vocabulary:
        raise UnsupportedError(f"a table of shape {list(tensor.shape)} has too few rows for {sizes.vocabulary} tokens")
    return (rows_of(tensor, [(0, sizes.vocabulary)]),)


def _padded_rows(tensors: Sequence[Tensor], sizes: ModelSizes) -> Tensor:
    (tensor,) = tensors
    return padded(tensor, sizes.padded_vocabulary or tensor.shape[0])


TRANSFORMS: dict[str, Transform] = {
    "same": Transform(1, _same, lambda tensors, sizes: tensors[0]),
    "transposed": Transform(1, lambda t, sizes: (transposed(t),), lambda tensors, sizes: transposed(tensors[0])),
    "vocabulary": Transform(1, _true_rows, _padded_rows),
    "gate_and_up": Transform(2, _split_halves, _join_halves),
    "qkv": Transform(3, _qkv, _fused_qkv),
    # GPT-2 also stores queries, keys and values in one tensor, but in three blocks.
    "qkv_blocks": Transform(
        1,
        lambda tensor, sizes: (concatenated(_qkv(tensor, sizes)),),
        lambda tensors, sizes: _fused_qkv(_equal_parts(tensors[0], 3), sizes),
    ),
    "qkv_blocks_transposed": Transform(
        1,
        lambda tensor, sizes: (transposed(concatenated(_qkv(tensor, sizes))),),
        lambda tensors, sizes: _fused_qkv(_equal_parts(transposed(tensors[0]), 3), sizes),
    ),
}
