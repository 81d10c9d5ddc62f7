"""Sums over pairs of tensors: by layer, by role in the layer, by state, by kind."""

import re
from collections.abc import Callable, Iterable, Sequence

from ckpt.compare.pairs import TensorDiff
from ckpt.compare.sums import DiffSums

GROUPINGS: dict[str, Callable[[TensorDiff], str]] = {
    "layer": lambda pair: layer_of(pair.name),
    "role": lambda pair: role_of(pair.name),
    "state": lambda pair: pair.state,
    "kind": lambda pair: pair.kind,
}

_LAYER = re.compile(r"(.*?(?:^|\.)\d{1,9})(?:\.|$)", re.DOTALL)
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def layer_of(name: str) -> str:
    """A name up to its first number, which counts the layers in nearly every model.

    >>> layer_of("model.layers.11.mlp.up.weight")
    'model.layers.11'
    """
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


def role_of(name: str) -> str:
    """What a tensor is in its layer: the rest of its name, or all of a name without a number.

    Further numbers, such as those of experts, count as one.

    >>> role_of("model.layers.11.mlp.experts.3.up.weight")
    'mlp.experts.*.up.weight'
    """
    match = _LAYER.match(name)
    return _NUMBER.sub("*", name[match.end() :]) if match else name


def grouped(pairs: Iterable[TensorDiff], by: Sequence[str]) -> list[tuple[tuple[str, ...], DiffSums]]:
    """Sums over groups of pairs, by the keys `by`. Norms and cosines are those of a group's tensors as one vector."""
    totals: dict[tuple[str, ...], DiffSums] = {}
    for pair in pairs:
        key = tuple(GROUPINGS[how](pair) for how in by)
        totals[key] = totals.get(key, DiffSums()) + pair.sums
    return list(totals.items())
