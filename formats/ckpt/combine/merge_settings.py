"""The settings of a merge: how much of which model, for all tensors or for those whose names match a pattern."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ckpt.combine.task_blob import Rescale
from ckpt_formats.core.arguments import Checked, Count, Range, shown
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.rules import Pattern
from ckpt_formats.core.text import printable

Method = Literal["linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"]
"""How models are merged."""

_DENSITY = Range(0, 1, above=True)
_PLACE = Range(0, 1)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_FIRST = re.compile(r"embed|wte|wpe")


@dataclass(frozen=True)
class TensorSettings(Checked):
    """What may differ from tensor to tensor. None: as for all tensors."""

    weights: tuple[float, ...] | None = None
    """A weight for each model."""
    density: tuple[float, ...] | None = None
    """The share of each model's differences that is kept: one for all models, or one for each."""
    t: tuple[float, ...] | None = None
    """The place between both models; several are spread over the layers, and between them it changes evenly."""

    def __post_init__(self) -> None:
        for name, bounds in (("weights", Range()), ("density", _DENSITY), ("t", _PLACE)):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):  # a number is one of them
                value = (value,)
                object.__setattr__(self, name, value)
            if isinstance(value, tuple) and not all(isinstance(x, (int, float)) and bounds.admits(x) for x in value):
                raise InvalidArgumentError(
                    f"{name} must be numbers {bounds}, not {shown(value)}",
                    where=name,
                    hint=f"Choose other numbers for {name}.",
                )
        super().__post_init__()


@dataclass(frozen=True)
class MergeSettings(Checked):
    """A method with all its settings; those that it does not have are refused."""

    method: Method
    tensors: TensorSettings = TensorSettings()
    where: tuple[tuple[Pattern, TensorSettings], ...] = ()
    """Other settings by pattern. Of the patterns that match a name, the first that has a setting counts."""
    scale: float = 1.0
    normalize: bool | None = None
    rescale: Rescale | None = None
    seed: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = _SETTINGS[self.method]
        scopes = (self.tensors, *(one for _, one in self.where))
        given = {f.name for one in scopes for f in fields(one) if getattr(one, f.name) is not None}
        given |= {name for name in ("normalize", "rescale", "seed") if getattr(self, name) is not None}
        given |= {"scale"} if self.scale != 1 else set()
        if foreign := sorted(given - own):
            raise InvalidArgumentError(
                f"the method {self.method} has no {foreign[0]}", hint=f"Its settings: {', '.join(sorted(own))}."
            )
        for required, why in (("t", "0 is the first model, 1 the second"), ("density", "the share that is kept")):
            if required in own and getattr(self.tensors, required) is None:
                raise InvalidArgumentError(
                    f"the method {self.method} needs {required}: {why}",
                    hint=f"Give `{required}` (--{required}).",
                )

    def check_models(self, count: int, has_base: bool) -> None:
        """Raise `InvalidArgumentError` if the numbers do not fit so many models, or a base is missing or too much."""
        if self.method in ("linear", "slerp") and has_base:
            raise InvalidArgumentError(
                f"the method {self.method} has no base: it merges the models themselves",
                where=f"method {self.method}",
                hint="Leave the base out.",
            )
        if self.method not in ("linear", "slerp") and not has_base:
            raise InvalidArgumentError(
                f"the method {self.method} needs the base from which the models were tuned",
                where=f"method {self.method}",
                hint="Name it with `base` (--base).",
            )
        if self.method == "slerp" and count != 2:
            raise InvalidArgumentError(
                f"slerp merges two models, not {count}",
                where="method slerp",
                hint="Give two models, or choose the method linear.",
            )
        if not count:
            raise InvalidArgumentError("a merge needs at least one model")
        for one in (self.tensors, *(settings for _, settings in self.where)):
            if one.weights is not None and len(one.weights) != count:
                raise InvalidArgumentError(f"there are {len(one.weights)} weights for {_models(count)}")
            is_mean = one.weights is not None and self.method == "linear" and self.is_normalized
            if is_mean and math.fsum(one.weights or ()) <= 0:
                raise InvalidArgumentError("the sum of the weights of a mean must be above zero")
            if one.density is not None and len(one.density) not in (1, count):
                raise InvalidArgumentError(f"there are {len(one.density)} densities for {_models(count)}")

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise `NoMatchError` for a pattern that matches no name: it is probably mistyped."""
        for pattern, _ in self.where:
            if not any(search(pattern, name) for name in names):
                raise NoMatchError(f"no tensor matches `{printable(pattern)}`", hint="`ckpt inspect` lists the names.")

    @property
    def is_normalized(self) -> bool:
        """Whether the sum is divided by the sum of weights."""
        return self.method in ("linear", "ties") if self.normalize is None else self.normalize

    def weights(self, name: str, count: int) -> tuple[float, ...]:
        """The models' weights for a tensor."""
        stated = self._stated(name, lambda one: one.weights)
        return (1.0,) * count if stated is None else tuple(map(float, stated))

    def densities(self, name: str, count: int) -> tuple[float, ...]:
        """The shares of the models' differences that are kept in a tensor."""
        stated = self._stated(name, lambda one: one.density) or (1.0,)
        return tuple(map(float, stated * count if len(stated) == 1 else stated))

    def t(self, name: str, layers: int) -> float:
        """The place between both models for a tensor of a model with so many layers.

        Of several numbers, embeddings get the first, and other tensors outside of layers the last.
        """
        values = self._stated(name, lambda one: one.t) or (0.5,)
        match = _LAYER.search(name)
        if match is None:
            return float(values[0] if _FIRST.search(name) else values[-1])
        at = int(match[1]) / max(layers - 1, 1) * (len(values) - 1)
        low = min(int(at), len(values) - 1)
        high = min(low + 1, len(values) - 1)
        return float(values[low] * (1 - (at - low)) + values[high] * (at - low))

    def _stated(
        self, name: str, setting: Callable[[TensorSettings], tuple[float, ...] | None]
    ) -> tuple[float, ...] | None:
        for pattern, one in self.where:
            if setting(one) is not None and search(pattern, name):
                return setting(one)
        return setting(self.tensors)


_OF_DIFFERENCES = frozenset({"weights", "scale", "normalize"})
_OF_DRAWS = _OF_DIFFERENCES | {"density", "rescale", "seed"}
_SETTINGS: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"weights", "normalize"}),
    "slerp": frozenset({"t"}),
    "task-arithmetic": _OF_DIFFERENCES,
    "ties": _OF_DIFFERENCES | {"density"},
    "dare-linear": _OF_DRAWS,
    "dare-ties": _OF_DRAWS,
}


def _models(count: int) -> str:
    return "1 model" if count == 1 else f"{count} models"


def layer_count(names: Iterable[str]) -> int:
    """The number of layers of a model: one more than the largest number of a layer in the names of its tensors."""
    numbers = [int(match[1]) for name in names if (match := _LAYER.search(name)) and len(match[1]) < 10]
    return max(numbers, default=0) + 1


def settings_of(
    method: str, where: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any], **rest: Any
) -> MergeSettings:
    """The settings as they are given to `merge`. Raises `InvalidArgumentError`."""
    names = [one.name for one in fields(TensorSettings)]
    for pattern, own in where.items():
        if unknown := [name for name in own if name not in names]:
            raise InvalidArgumentError(
                f"where: there is no setting {unknown[0]!r:.60} for `{printable(str(pattern))}`",
                hint=f"The settings are {', '.join(names)}.",
            )
    scopes = tuple((pattern, TensorSettings(**_tuples(own))) for pattern, own in where.items())
    return MergeSettings(method, TensorSettings(**_tuples(shared)), scopes, **rest)  # type: ignore[arg-type]


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sequences as tuples."""
    return {
        name: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name, value in settings.items()
    }
