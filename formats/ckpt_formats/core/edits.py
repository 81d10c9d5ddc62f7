"""Lazy edits of a checkpoint: fewer tensors, fewer states, other names, other values. No data is read."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from ckpt_formats.core.arguments import checked, invalid
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Edit, Group, Parameter
from ckpt_formats.core.computed_blobs import CastBlob, ComputedBlob
from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, DType, is_float
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.quantised.weights import (
    CONFIGS,
    check_still_known,
    check_together,
    may_have_quantised_states,
    quantised_weights,
    untouched_notices,
)
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.text import printable

_OF_THE_MODEL = ("args", "checkpoint_version", *CONFIGS)
"""Extras that state what the model is: Megatron's arguments, Hugging Face's configuration, how it was quantised."""
_OF_AN_OPTIMIZER = re.compile(
    r"(.*_)?(optim(izer)?|opt_param_scheduler|(lr_)?scheduler|(grad_|loss_)?scaler)(s|_states?|_state_dict)?(_\d+)?"
)
"""Extras that belong to an optimizer, its schedule or its loss scaler."""


@dataclass(frozen=True)
class Select(Edit):
    """Only the parameters whose names match."""

    only: tuple[str, ...]
    skip: tuple[str, ...]


@dataclass(frozen=True)
class WeightsOnly(Edit):
    """The model without optimizer and extras."""


@dataclass(frozen=True)
class OptimizerDropped(Edit):
    """All but what an optimizer has: its states, its groups, its schedule and its loss scaler."""


@dataclass(frozen=True)
class Cast(Edit):
    """Weights rounded to another type."""

    dtype: str
    allow_overflow: bool = False


@dataclass(frozen=True)
class Rename(Edit):
    """Other names: the new ones by the old ones."""

    names: Mapping[str, str]


@dataclass(frozen=True)
class Replace(Edit):
    """Other values: their types and the BLAKE2b digests of their bytes, by name."""

    digests: Mapping[str, str]


def edited(source: Checkpoint, edit: Edit, **changes: Any) -> Checkpoint:
    """The checkpoint with changed fields, and the edit at the end of its history."""
    return replace(source, history=(*source.history, edit), **changes)


@checked
def select(source: Checkpoint, only: Sequence[str], skip: Sequence[str]) -> Checkpoint:
    """See `Checkpoint.select`. A pattern that matches nothing is an error, because it is probably mistyped."""
    for pattern in (*only, *skip):
        safe_pattern(pattern, "--only or --skip")
        if not any(search(pattern, name) for name in source.parameters):
            raise NoMatchError(
                f"no parameter matches `{printable(pattern)}`",
                where=source.path,
                hint="`ckpt inspect` lists their names.",
            )
    parameters = {
        name: parameter
        for name, parameter in source.parameters.items()
        if parameter.role == "extra"
        or ((not only or any(search(p, name) for p in only)) and not any(search(p, name) for p in skip))
    }
    check_together(source, parameters.keys(), "selected")
    groups = tuple(Group(group.options, tuple(n for n in group.names if n in parameters)) for group in source.groups)
    aliases = {alias: name for alias, name in source.aliases.items() if name in parameters}
    edit = Select(tuple(only), tuple(skip))
    return edited(source, edit, parameters=parameters, groups=groups, aliases=aliases)


def weights_only(source: Checkpoint) -> Checkpoint:
    """See `Checkpoint.weights_only`."""
    parameters = {
        name: replace(parameter, states={MODEL: parameter.weight}, values={})
        for name, parameter in source.parameters.items()
        if parameter.role != "extra"
    }
    extras = {key: source.extras[key] for key in _OF_THE_MODEL if key in source.extras}
    # Suspicions are about the optimizer's states.
    return edited(source, WeightsOnly(), parameters=parameters, groups=(), extras=extras, suspicions=())


def without_optimizer(source: Checkpoint) -> Checkpoint:
    """See `Checkpoint.without_optimizer`."""
    parameters = {
        name: parameter
        if parameter.role == "extra"
        else replace(parameter, states={MODEL: parameter.weight}, values={})
        for name, parameter in source.parameters.items()
    }
    extras = {key: value for key, value in source.extras.items() if not _OF_AN_OPTIMIZER.fullmatch(key)}
    return edited(source, OptimizerDropped(), parameters=parameters, groups=(), extras=extras, suspicions=())


def cast(source: Checkpoint, name: str, allow_overflow: bool = False) -> Checkpoint:
    """See `Checkpoint.cast`."""
    dtype = DTYPES.get(SHORT_NAMES.get(name, name))
    if dtype is None or not is_float(dtype):
        raise InvalidArgumentError(
            f"{name!r} is not a floating-point type", hint=f"Known: {', '.join((*SHORT_NAMES, *DTYPES))}."
        )
    if dtype.name == "float8_e8m0fnu":
        raise InvalidArgumentError(
            f"{name!r} has only powers of two, no sign and no zero: it is a type of scales, not of weights",
            hint="Types of 8 bits for weights are float8_e4m3fn and float8_e5m2.",
        )
    refused = dtype.itemsize == 1 and not allow_overflow
    source = _with_plain_states(source)
    if not quantised_weights(source):
        parameters = {name: _cast(one, dtype, refused) for name, one in source.parameters.items()}
        notices = dict.fromkeys((*source.notices, *untouched_notices(source, (), "rounded")))
        return edited(source, Cast(dtype.name, allow_overflow), parameters=parameters, notices=tuple(notices))
    plain = dequantised(source)
    parameters = {name: _cast(one, dtype, refused) for name, one in plain.parameters.items()}
    return edited(plain, Cast(dtype.name, allow_overflow), parameters=parameters)


def _with_plain_states(source: Checkpoint) -> Checkpoint:
    """The checkpoint without states of an optimizer that are codes."""
    if not may_have_quantised_states(source):
        return source
    from ckpt_formats.core.quantised.states import dequantised_states  # other optimizers need no codecs

    return dequantised_states(source)


def dequantised(source: Checkpoint) -> Checkpoint:
    """The checkpoint with plain weights instead of quantised ones, of the type in which each scheme computes them.

    Only small tensors that describe weights are read. Raises `UnsupportedError` for a scheme that is not decoded.
    """
    from ckpt_formats.core.quantised.plain import plain_extras, plain_model  # a model without codes needs no codecs

    model = plain_model(source)
    model.check(source)
    removed = {*model.unused, *(name for one in quantised_weights(source) for name in one.parts)}
    tied = next((alias for alias, name in source.aliases.items() if name in removed), None)
    if tied is not None:
        raise UnsupportedError(f"`{printable(tied)}` is tied to a part of a quantised weight", where=source.path)
    weights = {one.parts[0]: one for one in model.weights}
    parameters: dict[str, Parameter] = {}
    for name, parameter in source.parameters.items():
        if name in weights:
            one = weights[name]
            if one.name in parameters or (one.name in source.parameters and one.name not in removed):
                raise UnsupportedError(f"two tensors would be called `{printable(one.name)}`", where=source.path)
            tensor = Tensor.of(ComputedBlob(one.tensor, one.name))
            parameters[one.name] = Parameter(one.name, parameter.role, {MODEL: tensor})
        elif name not in removed:
            parameters[name] = parameter
    return replace(
        source,
        parameters=parameters,
        extras=plain_extras(source.extras),
        notices=tuple(dict.fromkeys((*source.notices, *model.notices()))),
        digests={key: digest for key, digest in source.digests.items() if key[0] not in removed},
        errors={key: figures for key, figures in source.errors.items() if key[0] not in removed},
    )


def _cast(parameter: Parameter, dtype: DType, refused: bool) -> Parameter:
    if parameter.role == "extra" or not is_float(parameter.weight.dtype):
        return parameter
    from ckpt_codecs import Rounded  # readers import this module, and need no codec

    best = parameter.states.get(MASTER, parameter.weight)
    rounded = best if best.dtype == dtype else Tensor.of(CastBlob(Rounded(), best, dtype, parameter.name, refused))
    return replace(parameter, states={**parameter.states, MODEL: rounded})


def rename(source: Checkpoint, names: Mapping[str, str] | Callable[[str], str]) -> Checkpoint:
    """See `Checkpoint.rename`."""
    if callable(names):
        chosen = {name: names(name) for name in (*source, *source.aliases)}
    else:
        chosen = dict(names)
        _check_texts("rename", chosen)
        for name in chosen:
            if name not in source.parameters and name not in source.aliases:
                raise NoMatchError(
                    f"no parameter is called `{printable(name)}`", hint="`ckpt inspect` lists their names."
                )
    _check_texts("rename", chosen.values())
    new = {name: chosen.get(name, name) for name in source.parameters}
    aliases = {chosen.get(alias, alias): new[name] for alias, name in source.aliases.items()}
    seen: set[str] = set()
    for name in (*new.values(), *(chosen.get(alias, alias) for alias in source.aliases)):
        if name in seen:
            both = [old for old in (*source.parameters, *source.aliases) if chosen.get(old, old) == name]
            raise InvalidArgumentError(
                f"{' and '.join(map(printable, both[:2]))} would both become {printable(name)}",
                where=source.path,
                hint="Give them different names; `ckpt inspect` lists the current ones.",
            )
        seen.add(name)
    changed = {old: name for old, name in chosen.items() if old != name}
    renamed = edited(
        source,
        Rename(changed),
        parameters={new[name]: replace(p, name=new[name]) for name, p in source.parameters.items()},
        groups=tuple(Group(g.options, tuple(new.get(n, n) for n in g.names)) for g in source.groups),
        aliases=aliases,
        digests={(new.get(n, n), state): digest for (n, state), digest in source.digests.items()},
        errors={(new.get(n, n), state): figures for (n, state), figures in source.errors.items()},
    )
    check_still_known(source, renamed, new)
    return renamed


def _check_texts(method: str, names: Iterable[object]) -> None:
    """Raise `InvalidArgumentError` if a name of a parameter is none."""
    for name in names:
        if not isinstance(name, str):
            raise invalid(f"Checkpoint.{method}", "each name", "a text", name)


def replace_values(
    source: Checkpoint, arrays: Mapping[str, Any], new_names: bool = False, new_shapes: bool = False
) -> Checkpoint:
    """See `Checkpoint.replace`."""
    _check_texts("replace", arrays)
    names = {source.aliases.get(key, key) for key in arrays}
    check_together(source, {name for name in names if name in source.parameters}, "replaced")
    parameters, digests = dict(source.parameters), dict[str, str]()
    dropped: set[str] = set()
    for key, given in arrays.items():
        name, values = source.aliases.get(key, key), np.array(given, order="C")
        parameter = parameters.get(name)
        if parameter is None and not new_names:
            what, hint = f"no parameter is called `{printable(key)}`", "To add parameters, give new_names=True."
            raise NoMatchError(what, hint=f"`ckpt inspect` lists their names. {hint}")
        if parameter is not None and values.shape != parameter.weight.shape and not new_shapes:
            shapes = f"{list(parameter.weight.shape)}, not {list(values.shape)}"
            what = f"`{printable(name)}` has the shape {shapes}"
            raise InvalidArgumentError(what, hint="To replace it all the same, give new_shapes=True.")
        if values.dtype not in DTYPES.values():
            raise InvalidArgumentError(f"`{printable(name)}`: no checkpoint holds elements of type {values.dtype}")
        values.flags.writeable = False
        states = {MODEL: Tensor.of(ArrayBlob(values))}
        if parameter is None:
            parameters[name] = Parameter(name, "parameter", states)
        else:
            parameters[name] = replace(parameter, states=states, values={})
        digests[name] = f"{values.dtype} {list(values.shape)} {blake2b(values.tobytes(), digest_size=16).hexdigest()}"
        dropped.add(name)
    groups = tuple(Group(g.options, tuple(n for n in g.names if n not in dropped)) for g in source.groups)
    return edited(
        source,
        Replace(digests),
        parameters=parameters,
        groups=groups,
        digests={key: digest for key, digest in source.digests.items() if key[0] not in dropped},
        errors={key: figures for key, figures in source.errors.items() if key[0] not in dropped},
    )
