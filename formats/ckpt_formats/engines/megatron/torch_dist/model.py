"""Tensors of a `torch_dist` checkpoint under the names of the whole model.

Keys are the model's own names, but layers are stacked along a first axis, experts
along the next, and the norm before a projection is always called as inside it.
Some are stored in pieces: gate and up of singleton shards, the segments of Mamba.

    decoder.layers.self_attention.linear_qkv.weight             [layers, rows, hidden]
    decoder.layers.mlp.experts.experts.linear_fc1.weight        [layers, experts, 2 * ffn, hidden]
    decoder.layers.7.mlp.linear_fc1.weight                      where layers are not all alike
    decoder.layers.7.mixer.in_proj.weight.z, .x, .B, .C, .dt
"""

import re
from collections.abc import Iterator, Mapping
from math import prod

from ckpt_formats.core.errors import Corrupt, Unsafe
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import unstacked_all
from ckpt_formats.engines.megatron.shared.names import Naming, unstack
from ckpt_formats.names.views import stacked

_PIECES = (("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"), (".x", ".B", ".C"), (".query", ".key", ".value"))
_DELTA = (".query", ".key", ".value", ".z", ".beta", ".alpha")
_PIECE = re.compile(r"(.*\.(?:weight|bias)\d*)(_[wv]|\.(?:z|x|B|C|dt|query|key|value|beta|alpha))")
_MOST_STACKED = 1 << 20
_SINGLE_EXPERT = re.compile(r"(.*\.experts)\.experts\.(\d+)(\..*)")


def named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name. Raises `Corrupt` if pieces of one are missing, or two keys are one name."""
    found: dict[str, Tensor] = {}
    for key, tensor in _joined(tensors):
        for name, one in _apart(key, tensor):
            if name in found:
                raise Corrupt(f"`{printable(name)}` is stored twice")
            found[name] = one
    return found


def names_of(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names that a key stands for, each with its place along the first axes."""
    single = _SINGLE_EXPERT.fullmatch(key)
    if single:
        key = f"{single[1]}.local_experts.{single[2]}{single[3]}"
    name, by_layer = unstack(key)
    axes = (*(("layer",) if by_layer else ()), *(("expert",) if "{expert}" in name else ()))
    if len(shape) < len(axes):
        raise Corrupt(f"`{printable(key)}` of shape {list(shape)} is not stacked")
    if prod(shape[: len(axes)]) > _MOST_STACKED:
        raise Unsafe(f"`{printable(key)}` is a stack of {prod(shape[: len(axes)]):,} tensors")
    places: list[tuple[int, ...]] = [()]
    for length in shape[: len(axes)]:
        places = [(*place, i) for place in places for i in range(length)]
    for place in places:
        made = name
        for axis, number in zip(axes, place, strict=True):
            made = made.replace(f"{{{axis}}}", str(number), 1)
        yield Naming().plain(made), place


def _apart(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts: dict[tuple[int, ...], Tensor] = {(): tensor}
    titles = list(names_of(key, tensor.shape))
    for _ in range(len(titles[0][1]) if titles else 0):
        parts = {(*place, i): one for place, whole in parts.items() for i, one in enumerate(unstacked_all(whole))}
    for name, place in titles:
        yield name, parts[place]


def _joined(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are stored in pieces, put together along the first axis that is not stacked."""
    pieces: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _PIECE.fullmatch(key):
            pieces.setdefault(match[1], {})[match[2]] = tensor
        else:
            yield key, tensor
    for key, held in pieces.items():
        order = next((order for order in (_DELTA, *_PIECES) if set(order) == set(held)), None)
        if order is None:
            raise Corrupt(f"`{printable(key)}` is stored in pieces, of which only {', '.join(held)} are there")
        if unstack(key)[1]:
            raise Corrupt(f"`{printable(key)}` is stored in pieces and stacked by layer, which Megatron never does")
        yield key, stacked([held[piece] for piece in order])
