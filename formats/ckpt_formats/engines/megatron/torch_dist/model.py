"""Read the tensors of a `torch_dist` checkpoint under the names of the full model.

Keys are the model's own names, with three differences: layers are stacked along the first axis and experts along the
next, a norm before a projection always has its name inside the projection, and some tensors are stored in parts: gate
and up of singleton shards, the segments of Mamba.

    decoder.layers.self_attention.linear_qkv.weight             [layers, rows, hidden]
    decoder.layers.mlp.experts.experts.linear_fc1.weight        [layers, experts, 2 * ffn, hidden]
    decoder.layers.7.mlp.linear_fc1.weight                      if layers are of several kinds
    decoder.layers.7.mixer.in_proj.weight.z, .x, .B, .C, .dt
"""

import re
from collections.abc import Iterator, Mapping
from math import prod

from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import CorruptError, UnsafeError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import concatenated, unstacked_all
from ckpt_formats.engines.megatron.shared.names import Naming, unstack

_PART_SUFFIXES = (("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"), (".x", ".B", ".C"), (".query", ".key", ".value"))
_DELTA = (".query", ".key", ".value", ".z", ".beta", ".alpha")
_PART = re.compile(r"(.*\.(?:weight|bias)\d*)(_[wv]|\.(?:z|x|B|C|dt|query|key|value|beta|alpha))")
_SINGLE_EXPERT = re.compile(r"(.*\.experts)\.experts\.(\d+)(\..*)")


def tensors_by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name. Raises `CorruptError` if parts of a tensor are missing, or two keys stand for one name."""
    by_name: dict[str, Tensor] = {}
    for key, tensor in _join_parts(tensors):
        for name, part in _unstack_key(key, tensor):
            if name in by_name:
                raise CorruptError(f"`{printable(name)}` is stored twice")
            by_name[name] = part
    return by_name


def names_of(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names that a key stands for, each with its place along the stacked axes.

    Raises: CorruptError if the shape has too few axes, UnsafeError if the stack is too large.
    """
    single = _SINGLE_EXPERT.fullmatch(key)
    if single:
        key = f"{single[1]}.local_experts.{single[2]}{single[3]}"
    name, by_layer = unstack(key)
    axes = (*(("layer",) if by_layer else ()), *(("expert",) if "{expert}" in name else ()))
    if len(shape) < len(axes):
        raise CorruptError(f"`{printable(key)}` of shape {list(shape)} is not stacked")
    if prod(shape[: len(axes)]) > MAX_NUMBER:
        raise UnsafeError(f"`{printable(key)}` is a stack of {prod(shape[: len(axes)]):,} tensors")
    places: list[tuple[int, ...]] = [()]
    for length in shape[: len(axes)]:
        places = [(*place, i) for place in places for i in range(length)]
    for place in places:
        full_name = name
        for axis, number in zip(axes, place, strict=True):
            full_name = full_name.replace(f"{{{axis}}}", str(number), 1)
        yield Naming().plain(full_name), place


def _unstack_key(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts: dict[tuple[int, ...], Tensor] = {(): tensor}
    titles = list(names_of(key, tensor.shape))
    for _ in range(len(titles[0][1]) if titles else 0):
        parts = {(*place, i): part for place, stack in parts.items() for i, part in enumerate(unstacked_all(stack))}
    for name, place in titles:
        yield name, parts[place]


def _join_parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All tensors; those that are stored in parts are concatenated along the first axis that is not stacked."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _PART.fullmatch(key):
            parts.setdefault(match[1], {})[match[2]] = tensor
        else:
            yield key, tensor
    for key, by_suffix in parts.items():
        order = next((order for order in (_DELTA, *_PART_SUFFIXES) if set(order) == set(by_suffix)), None)
        if order is None:
            raise CorruptError(
                f"`{printable(key)}` is stored in parts, of which only {', '.join(by_suffix)} are present"
            )
        if unstack(key)[1]:
            raise CorruptError(f"`{printable(key)}` is stored in parts and stacked by layer, which Megatron never does")
        yield key, concatenated([by_suffix[suffix] for suffix in order])
