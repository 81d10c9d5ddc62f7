"""Quantised weights: which tensors of a checkpoint are codes and scales, known by names, types and configuration.

The value of a quantised weight is computed from several tensors together: codes, scales, zero points, tables. If one of
them is rounded, averaged or left out alone, every value of the weight is wrong, and nothing in the file says so. So
edits ask this module first, and leave all tensors of such a weight as they are, or refuse.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_table import ROLES, TabulatedParameters
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value

CONFIGS = ("hf/config.json", "hf/quantize_config.json", "hf/quant_config.json", "hf/hf_quant_config.json")
"""Extras that may state how a model was quantised."""
TABLES = ("quantization_config", "compression_config", "quantization")
"""The keys of a configuration under which it states this."""
_METHODS = ("quant_method", "quant_algo", "quant_type", "load_in_4bit", "load_in_8bit")
_SIGNS = re.compile(
    r"scale|zero|absmax|quant|qweight|qdata|packed|int_repr|codebook|centroid|(?:^|\.)(?:SCB|W_q|g_idx)$|_blocks$",
    re.IGNORECASE | re.MULTILINE,
)
"""What occurs in the name of at least one tensor of each quantised weight."""
_WORDS = frozenset(
    {"scale", "scales", "zero", "zeros", "qzeros", "zp", "absmax", "amax", "quant", "qmap", "scb", "codebook"}
    | {"codebooks", "centroid", "centroids", "lut"}
)
"""Words in the names of scales, zero points and tables."""
_COUNTERS = re.compile(r"(?:^|_)(?:ids|tracked|step)$")
_PLACES = re.compile(r"(?:^|_)(?:ids|ind|index|indexes|indices|tracked|table|mask|step|idx)$")
"""How buffers of integers are called that are no codes: positions, counters. If the configuration states a
quantisation, integers that are called indices may be codes."""
_CACHE = re.compile(r"(?:q|k|v|kv|prob|output)_(?:scale|zero_point)")
"""Scales of a cache of keys and values, which lie beside weights."""
_CODES_OF_STATES = re.compile(r".+\.codes|state[12]")
"""The names of the codes of torchao's and bitsandbytes' optimizers."""
_BIAS = re.compile(r"(?:.*_)?bias")


@dataclass(frozen=True)
class Scheme:
    """A way to quantise: the names that its tensors have in their module."""

    name: str
    sign: str
    """A pattern of the name by which it is recognised."""
    parts: str
    """A pattern of the names of all its tensors."""
    needs_codes: bool = False
    """Whether plain weights have such names, too, so that integers or 8-bit floats must be among them."""


SCHEMES = (
    Scheme("bitsandbytes NF4", r"weight\.quant_state\.bitsandbytes__nf4", r"weight(?:\..+)?"),
    Scheme("bitsandbytes FP4", r"weight\.quant_state\.bitsandbytes__fp4", r"weight(?:\..+)?"),
    Scheme("bitsandbytes 4 bits", r"weight\.(?:nested_)?(?:absmax|quant_map)", r"weight(?:\..+)?"),
    Scheme("bitsandbytes INT8", r"(?:weight\.)?SCB", r"weight|(?:weight\.)?SCB|weight_format"),
    Scheme("quanto", r"weight\._(?:data|scale)", r"weight(?:\..+)?|(?:in|out)put_scale"),
    Scheme("quantised by torch", r"(?:weight\.)?int_repr", r"(?:weight\.)?(?:int_repr|scales?|zero_points?|axis)"),
    Scheme("torchao", r"_?weight_?_qdata", r"_?weight_.+"),
    Scheme("HQQ", r"W_q", r".+", needs_codes=True),
    Scheme("GPTQ", r"g_idx", r"q(?:weight|zeros)|scales|g_idx|perm|channel_scale"),
    Scheme("AWQ or GPTQ", r"qweight|qzeros", r"q(?:weight|zeros)|scales|channel_scale"),
    Scheme("NVFP4", r"weight_(?:scale_2|global_scale)", r"weight(?:_.+)?|(?:in|out)put_.*scale.*|pre_quant_scale"),
    Scheme("packed integers", r"weight_packed", r"weight(?:_.+)?|(?:in|out)put_(?:scale|zero_point)"),
    Scheme("MXFP4", r".+_blocks", r".+_(?:blocks|scales)"),
    Scheme("FP8 in blocks", r".+_scale_inv", r".+_scale_inv|(?:in|out)put_scale"),
    Scheme("codes with weight_scale", r"weight_scales?", r"weight(?:_.+)?|(?:in|out)put_(?:scale|zero_point)", True),
)
"""Schemes by the names of their tensors. The first one that fits counts, so those with more telling names come first.
Names: compressed-tensors, torchao, AutoAWQ, GPTQModel, HQQ, bitsandbytes, quanto, ModelOpt, transformers."""


@dataclass(frozen=True)
class QuantisedWeight:
    """The tensors that have the values of one or several weights of a module together."""

    module: str
    scheme: str
    parts: tuple[str, ...]
    """The names of its codes, scales, zero points and tables, in the order of the checkpoint."""


def quantised_weights(source: Checkpoint) -> tuple[QuantisedWeight, ...]:
    """The quantised weights of a checkpoint. No tensor is read.

    A module whose tensors have the names of no known scheme counts, too, if it has integers or 8-bit floats of the size
    of a weight beside tensors that are named as scales or zero points; and, if the configuration states a quantisation,
    if it has such numbers at all.
    """
    method = stated_method(source.extras)
    names = list(source.parameters)
    if method is None and not _SIGNS.search("\n".join(names)):
        return ()
    form_of, modules = _forms(source.parameters), dict[str, dict[str, str]]()
    for name in names:
        module, own = place_in_module(name)
        modules.setdefault(module, {})[own] = name
    weights: list[QuantisedWeight] = []
    rest: list[str] = []
    for module, named in modules.items():
        scheme, parts = _of_module(named, form_of, method)
        if parts:
            weights.append(QuantisedWeight(module, scheme, tuple(name for own, name in named.items() if own in parts)))
        rest += [name for own, name in named.items() if own not in parts and _CACHE.fullmatch(own)]
    if rest and (weights or method is not None):
        weights.append(QuantisedWeight("", "cache scales", tuple(rest)))
    return tuple(weights)


def may_have_quantised_states(source: Checkpoint) -> bool:
    """Whether states of an optimizer have the names of codes: `core/quantised/states.py` says which are."""
    if isinstance(source.parameters, TabulatedParameters):
        return any(map(_CODES_OF_STATES.fullmatch, source.parameters.table.states))
    return any(_CODES_OF_STATES.fullmatch(state) for one in source.parameters.values() for state in one.states)


def stated_method(extras: Mapping[str, Value]) -> str | None:
    """The quantisation that a model's configuration states, as it is called there; None if it states none."""
    table = _table(extras)
    return None if table is None else _method(table)


def stated_table(extras: Mapping[str, Value]) -> Mapping[str, Value]:
    """What a model's configuration states about its quantisation; nothing if it states none."""
    return _table(extras) or {}


def _table(extras: Mapping[str, Value]) -> Mapping[str, Value] | None:
    for key in CONFIGS:
        config = extras.get(key)
        if isinstance(config, dict):
            inner = [value for value in config.values() if isinstance(value, dict)]
            for table in (config, *inner):
                for name in TABLES:
                    if isinstance(table.get(name), dict):
                        own: Mapping[str, Value] = table[name]
                        return own
            if key != CONFIGS[0]:
                return config
    return None


def _method(table: Mapping[str, Value]) -> str:
    for key in _METHODS:
        value = table.get(key)
        if isinstance(value, str) and value:
            return value
        if value is True:
            return key
    return "unknown"


def place_in_module(name: str) -> tuple[str, str]:
    """The module of a tensor, and its name there: all that follows `weight.` is one name."""
    at = f".{name}".find(".weight.")
    if at >= 0:
        return name[: max(0, at - 1)], name[at:]
    module, _, own = name.rpartition(".")
    return module, own


class _Form(NamedTuple):
    """The dtype and shape of a weight."""

    dtype: DType
    shape: Shape


def _forms(parameters: Mapping[str, Parameter]) -> Callable[[str], _Form | None]:
    """The form of each weight by its name; None for an extra. No parameter of a table is made for it."""
    if isinstance(parameters, TabulatedParameters):
        table = parameters.table
        numbers = {name: number for number, name in enumerate(table.names)}

        def of_row(name: str) -> _Form | None:
            number = numbers[name]
            row = int(table.weight[number])
            extra = ROLES[int(table.role[number])] == "extra"
            return None if extra else _Form(table.dtypes[int(table.dtype[row])], table.shape(row))

        return of_row

    def of_parameter(name: str) -> _Form | None:
        one = parameters[name]
        return None if one.role == "extra" else _Form(one.weight.dtype, one.weight.shape)

    return of_parameter


def _of_module(
    named: Mapping[str, str], form_of: Callable[[str], _Form | None], method: str | None
) -> tuple[str, Collection[str]]:
    """The scheme of a module, and which of its tensors, by their names in it, are codes and scales."""
    if method is None and not any(_SIGNS.search(own) for own in named):
        return "", ()
    forms = ((own, form_of(name)) for own, name in named.items() if not _BIAS.fullmatch(own))
    tensors = {own: form for own, form in forms if form is not None}
    codes = {own for own, one in tensors.items() if _are_codes(own, one, method)}
    for scheme in SCHEMES:
        if scheme.needs_codes and not codes:
            continue
        signs = [own for own in tensors if re.fullmatch(scheme.sign, own)]
        stems = {own.removesuffix("_scale_inv").removesuffix("_blocks") for own in signs}
        if scheme.name == "MXFP4" and not any(f"{stem}_scales" in tensors for stem in stems):
            continue
        if signs:
            is_mxfp4 = scheme.name == "packed integers" and _are_mxfp4(tensors)
            return "MXFP4" if is_mxfp4 else scheme.name, {
                own for own in tensors if own in stems or re.fullmatch(scheme.parts, own)
            }
    scales = {own for own in tensors if _WORDS & set(re.split(r"[._]", own.lower()))}
    if codes and method is not None:
        return method, set(tensors)
    return ("codes with scales", codes | scales) if codes and scales - codes else ("", ())


def _are_mxfp4(tensors: Mapping[str, _Form]) -> bool:
    """Whether compressed-tensors packed codes of MXFP4: bytes, with scales that are exponents."""
    forms = [tensors.get(own) for own in ("weight_packed", "weight_scale")]
    return all(form is not None and form.dtype.name == "uint8" for form in forms)


def _are_codes(own: str, form: _Form, method: str | None) -> bool:
    dtype, shape = form
    if (_PLACES if method is None else _COUNTERS).search(own.lower()) or prod(shape) < 2:
        return False
    return _is_short(dtype) or (dtype.kind in "iu" and len(shape) >= 2)


def _is_short(dtype: DType) -> bool:
    return dtype.itemsize == 1 and dtype.kind != "b"


def parts_of(weights: Sequence[QuantisedWeight]) -> dict[str, QuantisedWeight]:
    """The quantised weight of each of its tensors."""
    return {name: weight for weight in weights for name in weight.parts}


def described(weights: Sequence[QuantisedWeight]) -> str:
    """How many weights are quantised, and how: `3 quantised weights (AWQ, MXFP4)`."""
    schemes = ", ".join(printable(scheme) for scheme in Counter(weight.scheme for weight in weights))
    return f"{len(weights):,} quantised weight{'s' * (len(weights) != 1)} ({schemes})"


def untouched_notices(source: Checkpoint, weights: Sequence[QuantisedWeight], action: str) -> Iterator[Notice]:
    """The notice that an edit, such as `rounded`, leaves these weights as they are."""
    if weights:
        text = f"not {action}, because codes and scales only have a meaning together: {described(weights)}"
        yield Notice(text, tuple(weight.module or weight.parts[0] for weight in weights), Weight.UNSURE)
    elif (method := stated_method(source.extras)) is not None:
        text = f"config.json states the quantisation {printable(method)!r}, but no tensor looks like its codes"
        yield Notice(f"{text}: all tensors are {action}", weight=Weight.UNSURE)


def check_together(source: Checkpoint, chosen: Collection[str], action: str) -> None:
    """Raise `UnsupportedError` if an edit concerns some tensors of a quantised weight, and not all of them.

    chosen: the names of all parameters that the edit concerns.
    """
    for weight in quantised_weights(source):
        inside = [name for name in weight.parts if name in chosen]
        outside = [name for name in weight.parts if name not in chosen]
        if inside and outside and weight.module:
            raise UnsupportedError(
                f"{list_names(inside)} cannot be {action} without {list_names(outside)}: together they are one "
                f"quantised weight ({printable(weight.scheme)})",
                where=source.path,
                hint=f"Name all tensors of `{printable(weight.module)}`, or none of them.",
            )


def check_still_known(source: Checkpoint, renamed: Checkpoint, names: Mapping[str, str]) -> None:
    """Raise `UnsupportedError` if under other names it is no longer known which tensors are one quantised weight.

    names: the new name of each parameter by the old one.
    """
    weights = [weight for weight in quantised_weights(source) if weight.module]
    if not weights:
        return
    known = {frozenset(weight.parts) for weight in quantised_weights(renamed)}
    for weight in weights:
        if frozenset(names[name] for name in weight.parts) not in known:
            raise UnsupportedError(
                f"under their new names, {list_names(weight.parts)} would no longer be known as one quantised weight "
                f"({printable(weight.scheme)})",
                where=source.path,
                hint="Rename the module, and leave the last parts of these names as they are.",
            )


def check_not_quantised(source: Checkpoint, action: str, modules: Collection[str] | None = None) -> None:
    """Raise `UnsupportedError` if a checkpoint has quantised weights, which `action` would have to compute with.

    modules: the names of the modules that the action concerns, which may lack the first part of their names here, or
    have one more; None: all.
    """
    weights = quantised_weights(source)
    if modules is not None:
        ends = {end for module in modules for end in _ends(module)}
        weights = tuple(weight for weight in weights if ends & {*_ends(weight.module)})
    if weights:
        raise UnsupportedError(
            f"{described(weights)} cannot be {action}: {list_names([weight.parts[0] for weight in weights])}",
            where=source.path,
            hint="Dequantise the model first: `ckpt convert MODEL TARGET --dtype bf16`.",
        )


def _ends(module: str) -> tuple[str, ...]:
    """The name of a module, and without its first part."""
    rest = module.partition(".")[2]
    return (module, rest) if "." in rest else (module,)
