"""Merges of models: by weights, on the arc between two, or by their differences from a base."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.combine.average_blob import AverageBlob
from ckpt.combine.merge_settings import MergeSettings, Method, layer_count, settings_of
from ckpt.combine.one_model import Combine, combined
from ckpt.combine.slerp_blob import SlerpBlob, SlerpFactors
from ckpt.combine.task_blob import (
    Drawn,
    FindFactor,
    FindThreshold,
    Largest,
    Rescale,
    TaskBlob,
    TaskVector,
    drawing_key,
)
from ckpt.combine.whole_tensor import Once
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint, Edit
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Blob, Tensor
from ckpt_formats.core.text import printable


@dataclass(frozen=True)
class Merge(Edit):
    """Models merged into one: where each is, the base first if there is one, and how it came to be."""

    sources: tuple[tuple[Path, tuple[Edit, ...]], ...]
    settings: MergeSettings

    def inputs(self) -> tuple[Path, ...]:
        return tuple(path for path, _ in self.sources)


@checked
def merge(
    models: Sequence[Checkpoint],
    method: Method,
    *,
    base: Checkpoint | None = None,
    weights: Sequence[float] | None = None,
    density: float | Sequence[float] | None = None,
    t: float | Sequence[float] | None = None,
    scale: float = 1.0,
    normalize: bool | None = None,
    rescale: Rescale | None = None,
    seed: int | None = None,
    where: Mapping[str, Mapping[str, Any]] = {},
) -> Checkpoint:
    """One model out of several of the same names and shapes, without optimizer, with the files of the first source.

    The sources are `base`, if it is given, and the models.

    The method says what an element is, where `d` is the difference of a model's element from that of `base`, and `w`
    the model's weight:

    - `linear`: `sum(w * x) / sum(w)`, or without `normalize` the sum alone.
    - `slerp`: the point at `t` on the arc from the first model (0) to the second (1), each tensor taken as one vector;
      where their cosine is above 0.9995 or below -0.9995, the point on the line.
    - `task-arithmetic`: `base + scale * sum(w * d)`.
    - `ties`: of each model's `d`, the share `density` with the largest absolute values is kept, in each tensor. Then
      only those count that have the sign of their weighted sum; with `normalize`, their sum is divided by the sum of
      their weights, which is the default here and for `linear`.
    - `dare-linear`, `dare-ties`: each `d` is kept with the probability `density`, and divided by it; then as in
      `task-arithmetic` and `ties`. `rescale` may be "none", or "l1": what is kept is multiplied by the factor that
      restores the sum of absolute values in the tensor. What is kept is a function of `seed` (0), the tensor's name,
      the model's number and the element's position.

    Elements are computed in float64 and rounded once to the type of the first source, so they differ from mergekit's,
    which computes in the type of its option `dtype`, by that rounding. In `ties`, differences are ordered by their
    float32 values; of equal ones, those at the lowest positions are kept. mergekit draws from torch's generator, so
    its `dare` keeps other elements; the arithmetic is the same. NaN and infinity spread, and writing the result notes
    how many there are.

    `weights`: one for each model; None: all are 1. `density`: one for all models, or one for each. `t`: several are
    spread evenly over the layers. `where`: other `weights`, `density` and `t` for tensors whose names a pattern
    matches; the first pattern with such a setting counts.

    `slerp`, `ties` and `rescale="l1"` read each tensor once or up to three times more, when the first block of it is
    read. Memory: a few blocks of 64 Ki elements for each model.

    Raises `InvalidArgumentError` for settings that are missing, that the method does not have, or that do not fit the
    number of models, `NoMatchError` for a pattern that matches nothing, `IncompleteError` if a model lacks tensors,
    `UnsupportedError` if shapes or kinds of elements differ, for quantised weights and complex numbers.
    """
    shared = {"weights": weights, "density": density, "t": t}
    rest = {"scale": scale, "normalize": normalize, "rescale": rescale, "seed": seed}
    settings = settings_of(method, where, shared, **rest)
    settings.check_models(len(models), base is not None)
    sources = [*([] if base is None else [base]), *models]
    names = [name for name, one in sources[0].parameters.items() if one.role != "extra"]
    settings.check_patterns(names)
    for name in names:
        if sources[0].parameters[name].weight.dtype.kind == "c":
            raise UnsupportedError(
                f"`{printable(name)}` holds complex numbers, which {method} does not merge", hint="`average` does."
            )
    edit = Merge(tuple((source.path, source.history) for source in sources), settings)
    return combined(sources, edit, _combine(settings, layer_count(names)), "merged")


def _combine(settings: MergeSettings, layers: int) -> Combine:
    methods: dict[str, Callable[[str, Sequence[Tensor]], Blob]] = {
        "linear": partial(_linear, settings),
        "slerp": partial(_slerp, settings, layers),
    }
    return methods.get(settings.method, partial(_task_arithmetic, settings))


def _linear(settings: MergeSettings, name: str, tensors: Sequence[Tensor]) -> AverageBlob:
    weights = settings.weights(name, len(tensors))
    divisor = math.fsum(weights) if settings.is_normalized else 1.0
    return AverageBlob(tuple(tensors), weights, tensors[0].dtype, divisor)


def _slerp(settings: MergeSettings, layers: int, name: str, tensors: Sequence[Tensor]) -> SlerpBlob:
    first, second = tensors
    factors = Once(SlerpFactors(first, second, settings.t(name, layers)))
    return SlerpBlob(first, second, factors, first.dtype, Box.whole(first.shape))


def _task_arithmetic(settings: MergeSettings, name: str, tensors: Sequence[Tensor]) -> TaskBlob:
    base, *models = tensors
    weights, densities = (of(name, len(models)) for of in (settings.weights, settings.densities))
    selections = (_selection(settings, name, i, model, base, densities[i]) for i, model in enumerate(models))
    vectors = tuple(TaskVector(*one) for one in zip(models, weights, selections, strict=True))
    elect = settings.method in ("ties", "dare-ties")
    return TaskBlob(base, vectors, settings.scale, elect, settings.is_normalized, Box.whole(base.shape))


def _selection(
    settings: MergeSettings, name: str, number: int, model: Blob, base: Blob, density: float
) -> Largest | Drawn | None:
    """Which elements of a model's difference from the base are kept; None: all of them."""
    size = math.prod(base.shape)
    if density >= 1 or settings.method == "task-arithmetic" or not size:
        return None
    if settings.method == "ties":
        return Largest(Once(FindThreshold(model, base, max(1, int(density * size)))))
    key = drawing_key(settings.seed or 0, name, number)
    if settings.rescale == "l1":
        return Drawn(key, density, Once(FindFactor(model, base, key, density)))
    return Drawn(key, density, 1.0 if settings.rescale == "none" else 1 / density)
