"""Lazy changes to a checkpoint on its way: fewer tensors, fewer states, another element type. No data is read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_codecs import Rounded
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, DType, is_float
from ckpt_formats.core.errors import NotFound, Unsupported
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import DerivedBlob, Tensor
from ckpt_formats.core.text import printable

if TYPE_CHECKING:
    from ckpt_formats.names import Naming

_OF_THE_MODEL = ("args", "checkpoint_version", "hf/config.json")
"""Extras that say what the model is: Megatron's arguments, Hugging Face's configuration."""


@dataclass(frozen=True)
class Edits:
    """How a checkpoint is to be changed on its way."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    model_only: bool = False
    dtype: str | None = None
    names: "Naming | None" = None


def only(source: Checkpoint, keep: Sequence[str], drop: Sequence[str]) -> Checkpoint:
    """The parameters whose names match one of `keep` (all, if empty) and none of `drop`. Extras stay.

    Patterns are regular expressions, found anywhere in a name. Raises `NotFound`
    for one that matches nothing, since it is surely mistyped.
    """
    for pattern in (*keep, *drop):
        safe_pattern(pattern, "--only or --skip")
        if not any(re.search(pattern, name) for name in source.parameters):
            raise NotFound(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
    kept = {
        name: parameter
        for name, parameter in source.parameters.items()
        if parameter.role == "extra"
        or ((not keep or any(re.search(p, name) for p in keep)) and not any(re.search(p, name) for p in drop))
    }
    groups = tuple(Group(group.options, tuple(n for n in group.names if n in kept)) for group in source.groups)
    aliases = {alias: name for alias, name in source.aliases.items() if name in kept}
    return replace(source, parameters=kept, groups=groups, aliases=aliases)


def model_only(source: Checkpoint) -> Checkpoint:
    """The model's own tensors and what says its sizes, without optimizer, masters or other extras."""
    parameters = {
        name: replace(parameter, states={MODEL: parameter.weight}, values={})
        for name, parameter in source.parameters.items()
        if parameter.role != "extra"
    }
    extras = {key: source.extras[key] for key in _OF_THE_MODEL if key in source.extras}
    # What makes a checkpoint doubtful is its optimizer's states.
    return replace(source, parameters=parameters, groups=(), extras=extras, suspicions=())


def cast(source: Checkpoint, name: str) -> Checkpoint:
    """The model's floating-point weights in another precision, rounded to nearest; optimizer states stay."""
    dtype = DTYPES.get(SHORT_NAMES.get(name, name))
    if dtype is None or not is_float(dtype):
        raise Unsupported(
            f"{name!r} is not a floating-point type", hint=f"Known: {', '.join((*SHORT_NAMES, *DTYPES))}."
        )
    parameters = {n: _cast(parameter, dtype) for n, parameter in source.parameters.items()}
    return replace(source, parameters=parameters)


def _cast(parameter: Parameter, dtype: DType) -> Parameter:
    if parameter.role == "extra" or not is_float(parameter.weight.dtype):
        return parameter
    best = parameter.states.get(MASTER, parameter.weight)
    made = best if best.dtype == dtype else Tensor.of(DerivedBlob(Rounded(), best, dtype))
    return replace(parameter, states={**parameter.states, MODEL: made})
