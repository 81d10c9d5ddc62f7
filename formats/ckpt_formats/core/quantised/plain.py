"""The plain weights of a quantised checkpoint: their names, and how their values are computed.

Which scheme it is, is known by names (`weights`); shapes, types, the configuration and small tensors that describe a
weight say the rest. What they leave open is refused: a wrong group size gives numbers that look like weights.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import Quantisation
from ckpt_codecs.quantised.fp4 import LookupTable, Mxfp4, Nvfp4
from ckpt_codecs.quantised.integers import PACKED_BITS, Awq, Gptq, Hqq, PackedIntegers
from ckpt_codecs.quantised.scaled import CODES, ONE_127TH, ScaledCodes
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError, UnsupportedError, at_tensor
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.blob import quantised_tensor
from ckpt_formats.core.quantised.weights import (
    CONFIGS,
    TABLES,
    QuantisedWeight,
    parts_of,
    place_in_module,
    quantised_weights,
    stated_table,
)
from ckpt_formats.core.tensor import Tensor, checked_read
from ckpt_formats.core.text import list_names, printable, quoted
from ckpt_formats.core.values import Value

_MAX_DESCRIPTION = 1 << 16
"""Elements of a tensor that describes a weight, such as its shape."""
_USUAL_BLOCK = 128
_FOR_ACTIVATIONS = ("input_", "output_", "k_", "v_", "q_", "kv_", "prob_", "activation_", "pre_quant")


class NotDecodable(Exception):
    """Why a quantised weight cannot be turned into plain values, in words that follow its name."""


@dataclass(frozen=True)
class PlainWeight:
    """A weight that is stored quantised."""

    name: str
    """Of the plain weight."""
    scheme: str
    quantisation: Quantisation
    parts: tuple[str, ...]
    """The names of the parts, in the order of the quantisation."""
    tensor: Tensor
    """The values."""
    remark: str = ""
    """An assumption that the files do not fully prove."""


@dataclass(frozen=True)
class PlainModel:
    """All quantised weights of a checkpoint as plain ones."""

    weights: tuple[PlainWeight, ...]
    unused: tuple[str, ...]
    """Tensors that plain weights do not need: scales of activations and caches, descriptions."""
    failures: Mapping[str, str]
    """Why others cannot be decoded, by module."""

    def check(self, source: Checkpoint) -> None:
        """Raise `UnsupportedError` if a weight cannot be decoded."""
        if self.failures:
            failures = list_names(self.failures.items(), lambda one: f"{quoted(one[0])} {one[1]}", separator="; ")
            raise UnsupportedError(
                f"quantised weights cannot be dequantised: {failures}",
                where=source.path,
                hint="Without --dtype, codes and scales are copied as they are. Or dequantise the model with the "
                "library that quantised it.",
            )

    def notices(self) -> tuple[Notice, ...]:
        """What the user should know of weights that are written as plain ones."""
        schemes = dict.fromkeys(one.scheme for one in self.weights)
        notices = [
            Notice(f"dequantised from {printable(scheme)}: {len(names):,} weight{'s' * (len(names) != 1)}", names)
            for scheme in schemes
            for names in [tuple(one.name for one in self.weights if one.scheme == scheme)]
        ]
        for remark in dict.fromkeys(one.remark for one in self.weights if one.remark):
            names = tuple(one.name for one in self.weights if one.remark == remark)
            notices.append(Notice(remark, names, Weight.UNSURE))
        if self.unused:
            notices.append(Notice("left out, since plain weights do not need them", self.unused))
        return tuple(notices)


def plain_model(source: Checkpoint) -> PlainModel:
    """The quantised weights of a checkpoint as plain ones. Only small tensors that describe weights are read.

    Raises `CkptError` if such a tensor cannot be read.
    """
    weights: list[PlainWeight] = []
    unused: list[str] = []
    failures: dict[str, str] = {}
    table = stated_table(source.extras)
    for module in quantised_weights(source):
        if not module.module and module.scheme == "cache scales":
            unused += module.parts
            continue
        own = _Module(source, module, table)
        try:
            in_module = own.weights()
        except NotDecodable as error:
            failures[module.module or module.parts[0]] = str(error)
            continue
        weights += in_module
        used = {name for one in in_module for name in one.parts}
        unused += [name for name in module.parts if name not in used and name not in own.read]
    return PlainModel(tuple(weights), tuple(unused), failures)


def plain_where_they_differ(first: Checkpoint, second: Checkpoint) -> tuple[Checkpoint, Checkpoint, dict[str, str]]:
    """Two checkpoints whose weights can be compared by value, and the schemes of those that are dequantised, by name.

    A weight that one of them has quantised, and the other plain or in another scheme, is plain in both. Weights that
    are quantised alike stay codes and scales.
    """
    models = [plain_model(one) if quantised_weights(one) else PlainModel((), (), {}) for one in (first, second)]
    by_name = [{one.name: one for one in model.weights} for model in models]
    sources, schemes = [first, second], dict[str, str]()
    for number, (own, other, rival) in enumerate(((0, 1, second), (1, 0, first))):
        parameters = dict(sources[number].parameters)
        modules, others = parts_of(quantised_weights(sources[number])), _part_names(models[own])
        for name, one in by_name[own].items():
            counterpart = by_name[other].get(name)
            if counterpart is not None and _is_alike(one, counterpart):
                continue
            if counterpart is None and (name not in rival.parameters or name in _part_names(models[other])):
                continue
            role = parameters[one.parts[0]].role
            for part in modules[one.parts[0]].parts:
                if part in one.parts or part not in others:  # descriptions, scales of activations
                    parameters.pop(part, None)
            parameters[name] = Parameter(name, role, {MODEL: one.tensor})
            schemes[name] = one.scheme if counterpart is None or number == 0 else schemes.get(name, one.scheme)
        sources[number] = replace(sources[number], parameters=parameters)
    return sources[0], sources[1], schemes


def _is_alike(one: PlainWeight, other: PlainWeight) -> bool:
    """Whether two weights are stored in the same parts, so that their bits can be compared."""
    return one.quantisation == other.quantisation and one.parts == other.parts


def _part_names(model: PlainModel) -> set[str]:
    return {name for one in model.weights for name in one.parts}


def plain_extras(extras: Mapping[str, Value]) -> dict[str, Value]:
    """Extras that no longer state a quantisation."""
    result = {key: value for key, value in extras.items() if key == CONFIGS[0] or key not in CONFIGS}
    config = result.get(CONFIGS[0])
    if isinstance(config, dict):
        result[CONFIGS[0]] = _without_tables(
            {key: _without_tables(value) if isinstance(value, dict) else value for key, value in config.items()}
        )
    return result


def _without_tables(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not (key in TABLES and isinstance(value, dict))}


class _Module:
    """The tensors of one module that are quantised."""

    def __init__(self, source: Checkpoint, module: QuantisedWeight, table: Mapping[str, Value]) -> None:
        self.module, self.table = module, table
        self.names = {place_in_module(name)[1]: name for name in module.parts}
        parameters = {own: source.parameters[name] for own, name in self.names.items()}
        self.tensors = {own: parameter.weight for own, parameter in parameters.items()}
        self.states = sorted({name for p in parameters.values() for name in p.states if len(p.states) > 1})
        self.read: set[str] = set()

    def weights(self) -> list[PlainWeight]:
        if self.states:
            raise NotDecodable("has states of an optimizer, which belong to other weights than its codes")
        builder = _BUILDERS.get(self.module.scheme, _Module.scaled)
        return builder(self)

    def form(self, own: str) -> tuple[Shape, str]:
        """The shape and type of a tensor. Raises `NotDecodable` if there is none."""
        if own not in self.tensors:
            raise NotDecodable(f"has no `{printable(own)}` ({printable(self.module.scheme)})")
        return self.tensors[own].shape, self.tensors[own].dtype.name

    def small(self, own: str) -> Any:
        """The values of a small tensor that describes a weight, as an array."""
        tensor = self.tensors[own]
        if tensor.size > _MAX_DESCRIPTION:
            raise NotDecodable(f"has {tensor.size:,} elements in `{printable(own)}`, which should describe it")
        self.read.add(self.names[own])
        with at_tensor(printable(self.names[own])):
            return checked_read(tensor)

    def number(self, own: str) -> int:
        """A whole number that a tensor of one element holds."""
        self.form(own)
        values = self.small(own).reshape(-1)
        value = float(values[0]) if values.size == 1 and values.dtype.kind in "iufb" else 0.5
        if value != value // 1 or abs(value) >= 1 << 53:
            raise NotDecodable(f"does not state its `{printable(own)}` as a whole number")
        return int(value)

    def weight(
        self, plain: str, quantisation: Callable[[], Quantisation], parts: Sequence[str], remark: str = ""
    ) -> PlainWeight:
        """The weight of these parts. Raises `NotDecodable` if they do not fit."""
        for own in parts:
            self.form(own)
        try:
            scheme = quantisation()
            tensor = quantised_tensor(scheme, tuple(self.tensors[own] for own in parts))
        except (CodecError, CkptError) as error:
            raise NotDecodable(f"does not fit its scheme: {error}") from error
        module = self.module.module
        name = f"{module}.{plain}" if module else plain
        return PlainWeight(name, self.module.scheme, scheme, tuple(self.names[own] for own in parts), tensor, remark)

    def only(self, *known: str) -> None:
        """Raise `NotDecodable` if there are tensors besides those known, and those for activations and caches."""
        for own in self.names:
            if own not in known and not own.startswith(_FOR_ACTIVATIONS):
                raise NotDecodable(f"has a tensor `{printable(own)}`, which is not known ({self.module.scheme})")

    def scaled(self) -> list[PlainWeight]:
        """Codes of one byte with a scale each: FP8 and INT8."""
        weights: list[PlainWeight] = []
        known: list[str] = []
        for own, tensor in self.tensors.items():
            if tensor.dtype.name not in CODES or "scale" in own or "zero" in own:
                continue
            names = [f"{own}_scale_inv", f"{own}_scale", *(["scale"] if own == "weight" else [])]
            scales = next((name for name in names if name in self.tensors), None)
            if scales is None:
                raise NotDecodable(f"has codes in `{printable(own)}`, but no scales that are known")
            zeros = f"{own}_zero_point" if f"{own}_zero_point" in self.tensors else None
            parts = (own, scales) if zeros is None else (own, scales, zeros)
            known += parts
            weights.append(self.weight(own, partial(self._scaled_codes, *parts), parts))
        if not weights:
            raise NotDecodable(f"is of a scheme that ckpt does not decode ({printable(self.module.scheme)})")
        self.only(*known)
        return weights

    def _scaled_codes(self, codes: str, scales: str, zeros: str | None = None, factor: float | None = None) -> Any:
        (shape, code), (scale_shape, scale) = self.form(codes), self.form(scales)
        block = self._block(shape, scale_shape)
        zero_type = None if zeros is None else self.form(zeros)[1]
        return ScaledCodes(shape, code, scale, block, scale_shape, zero_type, factor)

    def _block(self, shape: Shape, scales: Shape) -> Shape:
        """The elements that share a scale, along each axis."""
        size = int(np.prod(scales, dtype=np.int64))
        if size == 1:
            return tuple(max(n, 1) for n in shape)
        if scales == shape[:1]:  # a scale for each row
            return (1, *(max(n, 1) for n in shape[1:]))
        if len(scales) != len(shape):
            raise NotDecodable(f"has scales of the shape {list(scales)} for codes of {list(shape)}")
        stated = self.table.get("weight_block_size")
        sizes: Any = stated if isinstance(stated, list) and len(stated) == 2 else (None, None)
        rest = len(shape) - 2
        return tuple(
            self._block_along(n, count, sizes[axis - rest] if axis >= rest else None)
            for axis, (n, count) in enumerate(zip(shape, scales, strict=True))
        )

    def _block_along(self, length: int, count: int, stated: Any) -> int:
        if count < 1 or count > max(length, 1):
            raise NotDecodable(f"has {count} scales along an axis of {length}")
        if type(stated) is int and stated > 0 and -(-length // stated) == count:
            return stated
        if count in (1, length):
            return length if count == 1 else 1
        even = length // count if length % count == 0 else None
        usual = _USUAL_BLOCK if -(-length // _USUAL_BLOCK) == count else None
        if usual is not None and even not in (None, usual):
            raise NotDecodable(f"may have blocks of {even} or of {usual}: no `weight_block_size` says which")
        if even is None and usual is None:
            raise NotDecodable(f"has {count} scales along an axis of {length}, and no `weight_block_size` that fits")
        return usual or even or 1

    def _ending(self, end: str) -> str:
        name = next((own for own in self.names if own.endswith(end)), None)
        if name is None:
            raise NotDecodable(f"has no `{end}` ({printable(self.module.scheme)})")
        return name

    def torchao(self) -> list[PlainWeight]:
        codes = self._ending("qdata")
        scales = codes.removesuffix("qdata") + "scale"
        self.only(codes, scales)
        return [self.weight("weight", lambda: self._scaled_codes(codes, scales), (codes, scales))]

    def int8_of_bitsandbytes(self) -> list[PlainWeight]:
        scales = self._ending("SCB")
        if "weight_format" in self.tensors and self.number("weight_format") != 0:
            raise NotDecodable("is stored in an order of a GPU: load and save it with bitsandbytes")
        self.only("weight", scales, "weight_format")
        parts = ("weight", scales)
        return [self.weight("weight", lambda: self._scaled_codes(*parts, factor=ONE_127TH), parts)]

    def four_bits_of_bitsandbytes(self) -> list[PlainWeight]:
        state = next((own for own in self.names if own.startswith("weight.quant_state.")), None)
        if state is None:
            raise NotDecodable("has no quant_state, which states its shape")
        stated = self._json(state)
        kind: Any
        block: Any
        shape: Any
        kind, block, shape = stated.get("quant_type"), stated.get("blocksize"), stated.get("shape")
        natural = isinstance(shape, list) and all(type(n) is int for n in shape) and type(block) is int
        if kind not in ("nf4", "fp4") or not natural:
            raise NotDecodable("has a quant_state that states no type, shape and block size")
        parts = ["weight", "weight.absmax", "weight.quant_map"]
        nested: Any = None
        offset: Any = 0.0
        if "weight.nested_absmax" in self.tensors:
            nested, offset = stated.get("nested_blocksize"), stated.get("nested_offset")
            if type(nested) is not int or type(offset) not in (int, float):
                raise NotDecodable("has a quant_state that does not state how its scales are quantised")
            parts += ["weight.nested_quant_map", "weight.nested_absmax"]
        self.only(*parts, state)
        codes = self.form("weight")[0]
        return [
            self.weight("weight", lambda: LookupTable(tuple(shape), block, kind == "fp4", nested, offset, codes), parts)
        ]

    def _json(self, own: str) -> dict[str, Any]:
        if self.form(own)[1] != "uint8":
            raise NotDecodable(f"has a `{printable(own)}` that is not a text")
        try:
            value = json.loads(self.small(own).tobytes())
        except (ValueError, RecursionError) as error:
            raise NotDecodable(f"has a `{printable(own)}` that is not JSON") from error
        return value if isinstance(value, dict) else {}

    def mxfp4(self) -> list[PlainWeight]:
        if "weight_packed" in self.tensors:
            return self._mxfp4_of_a_matrix(("weight_packed", "weight_scale"))
        weights: list[PlainWeight] = []
        known: list[str] = []
        for own in self.names:
            if own.endswith("_blocks"):
                stem = own.removesuffix("_blocks")
                parts = (own, f"{stem}_scales")
                known += parts
                (*rest, rows, groups, _), _ = self.form(own) if len(self.form(own)[0]) > 2 else ((0, 0, 0), "")
                weights.append(self.weight(stem, partial(Mxfp4, (*rest, groups * 32, rows)), parts))
        self.only(*known)
        return weights

    def _mxfp4_of_a_matrix(self, parts: tuple[str, str]) -> list[PlainWeight]:
        (shape, _), _ = self.form(parts[0]), self.form(parts[1])
        self.only(*parts)
        if len(shape) < 2:
            raise NotDecodable("has codes that are not a matrix")
        plain = (*shape[:-1], 2 * shape[-1])
        return [self.weight("weight", lambda: Mxfp4(plain, transposed=False, grouped=False), parts)]

    def nvfp4(self) -> list[PlainWeight]:
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        (shape, _), (overall, _) = self.form(parts[0]), self.form(parts[2])
        self.only(*parts)
        if not shape:
            raise NotDecodable("has codes that are not a matrix")
        return [self.weight("weight", lambda: Nvfp4((*shape[:-1], 2 * shape[-1]), overall), parts)]

    def packed_integers(self) -> list[PlainWeight]:
        (words, _), (scales, scale) = self.form("weight_packed"), self.form("weight_scale")
        self.form("weight_shape")
        shape = tuple(int(n) for n in self.small("weight_shape").reshape(-1)[:8])
        if len(shape) != 2 or len(words) != 2 or len(scales) != 2 or min(shape) < 1:
            raise NotDecodable(f"has the shape {list(shape)}, which is not decoded")
        bits = self._bits([b for b in PACKED_BITS if -(-shape[1] // (32 // b)) == words[1]])
        parts = ["weight_packed", "weight_scale"]
        zeros = "weight_zero_point" in self.tensors
        order = self.form("weight_g_idx")[1] if "weight_g_idx" in self.tensors else None
        parts += ["weight_zero_point"] * zeros + ["weight_g_idx"] * (order is not None)
        self.only(*parts, "weight_shape")
        return [self.weight("weight", lambda: PackedIntegers(shape, bits, scales[1], scale, zeros, order), parts)]

    def _bits(self, fitting: Sequence[int]) -> int:
        if len(fitting) != 1:
            raise NotDecodable("has codes of a size that its shape does not give")
        return fitting[0]

    def gptq_or_awq(self) -> list[PlainWeight]:
        (words, _), (zeros, _), (scales, scale) = (self.form(own) for own in ("qweight", "qzeros", "scales"))
        if not len(words) == len(zeros) == len(scales) == 2:
            raise NotDecodable("has codes that are not a matrix")
        groups, outputs = scales
        if words[1] * 8 == outputs and "g_idx" not in self.tensors:
            parts = ("qweight", "qzeros", "scales")
            self.only(*parts)
            if self.table.get("version", "gemm") not in ("gemm", "GEMM"):
                raise NotDecodable(f"is of AWQ's version {self.table.get('version')!r:.20}, which is not decoded")
            return [self.weight("weight", lambda: Awq((outputs, words[0]), groups, scale), parts)]
        if words[1] != outputs or not outputs:
            raise NotDecodable(f"has words of the shape {list(words)} for scales of {list(scales)}")
        bits = self._bits([b for b in PACKED_BITS if zeros[1] * (32 // b) == outputs])
        order = "g_idx" in self.tensors
        with_order = ("qweight", "qzeros", "scales", *["g_idx"] * order)
        self.only(*with_order)
        stated = self.table.get("checkpoint_format")
        if stated not in (None, "gptq", "gptq_v2"):
            raise NotDecodable(f"is in the form {stated!r:.40}, which is not decoded")
        remark = "no `checkpoint_format` is stated: read as version 1 of GPTQ" if stated is None else ""
        shape, less_one = (outputs, words[0] * (32 // bits)), stated != "gptq_v2"
        return [self.weight("weight", lambda: Gptq(shape, bits, groups, scale, less_one, order), with_order, remark)]

    def hqq(self) -> list[PlainWeight]:
        bits, group, axis = (self.number(own) for own in ("nbits", "group_size", "axis"))
        for own in ("view_as_float", "quant_scale", "quant_zero"):
            if own in self.tensors and self.number(own):
                raise NotDecodable(f"has `{own}`, which is not decoded")
        self.form("shape")
        shape = tuple(int(n) for n in self.small("shape").reshape(-1)[:8])
        scale = self.form("scale")[1]
        return [self.weight("weight", lambda: Hqq(shape, bits, group, axis, scale), ("W_q", "scale", "zero"))]

    def not_decoded(self) -> list[PlainWeight]:
        raise NotDecodable(f"is of a scheme that ckpt does not decode ({printable(self.module.scheme)})")


_BUILDERS: dict[str, Callable[[_Module], list[PlainWeight]]] = {
    "bitsandbytes NF4": _Module.four_bits_of_bitsandbytes,
    "bitsandbytes FP4": _Module.four_bits_of_bitsandbytes,
    "bitsandbytes 4 bits": _Module.four_bits_of_bitsandbytes,
    "bitsandbytes INT8": _Module.int8_of_bitsandbytes,
    "quanto": _Module.not_decoded,
    "quantised by torch": _Module.not_decoded,
    "torchao": _Module.torchao,
    "HQQ": _Module.hqq,
    "GPTQ": _Module.gptq_or_awq,
    "AWQ or GPTQ": _Module.gptq_or_awq,
    "NVFP4": _Module.nvfp4,
    "packed integers": _Module.packed_integers,
    "MXFP4": _Module.mxfp4,
}
"""How each scheme is decoded; others have codes of one byte with scales, or are not decoded."""
