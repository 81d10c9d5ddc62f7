"""Optimizers' states of 8 and 4 bits: which states of a parameter are codes, scales and tables of one plain state.

    torchao        exp_avg.codes, exp_avg.scale, exp_avg.qmap: 8 and 4 bits; FP8 has no table; exp_avg.object: the class
    bitsandbytes   state1, absmax1, qmap1: 8 bits; Adam's second moment is state2, absmax2, qmap2

A file keeps the parts, bit for bit. What needs numbers asks here for the plain states.
Sources: torchao/optim/subclass_{8bit,4bit,fp8}.py, bitsandbytes/optim/optimizer.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.flat_blocks import FlatBlocks
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.computed_blobs import ComputedBlob
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.quantised.blob import quantised_tensor
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import with_shape

_CODES = re.compile(r"(.+)\.codes|state([12])")
"""The names of states that may be codes."""
_OBJECT = "object"
_SIGNS = ("absmax", "qmap", "max")
"""How states begin that bitsandbytes' optimizers have beside codes."""
_BLOCKS_OF_BITSANDBYTES = (256, 2048)
"""The values of a block, in versions from 0.44 on and before."""
_MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
"""What bitsandbytes' optimizers with two states have in them."""


@dataclass(frozen=True)
class QuantisedState:
    """A state that is stored as codes with scales."""

    parameter: str
    name: str
    """Of the plain state."""
    scheme: str
    parts: tuple[str, ...]
    """The states that have it, codes first."""
    bits: float | None = None
    """None if it is not decoded."""
    tensor: Tensor | None = None
    """The values, float32 of the parameter's shape."""
    problem: str = ""
    """Why it is not decoded, in words that follow its name."""


def quantised_states(source: Checkpoint) -> tuple[QuantisedState, ...]:
    """The quantised states of a checkpoint. No tensor is read."""
    return tuple(state for parameter in source.parameters.values() for state in _of_parameter(parameter))


def _of_parameter(parameter: Parameter) -> Iterator[QuantisedState]:
    states = parameter.states
    for own in states:
        match = _CODES.fullmatch(own)
        if match is None:
            continue
        if (stem := match[1]) is not None:
            if f"{stem}.scale" in states:
                yield _of_torchao(parameter, stem)
        elif states[own].dtype.name == "uint8" and any(sign + match[2] in states for sign in _SIGNS):
            yield _of_bitsandbytes(parameter, own, match[2])


def _of_torchao(parameter: Parameter, stem: str) -> QuantisedState:
    states, size = parameter.states, parameter.weight.size
    names = [f"{stem}.{part}" for part in ("codes", "scale", "qmap")]
    parts = tuple(name for name in names if name in states)
    codes, scales = states[parts[0]], states[parts[1]]
    is_half = len(parts) == 3 and states[parts[2]].size == 16
    code = "float8_e4m3fn" if len(parts) == 2 else "uint4" if is_half else "uint8"
    title = {"float8_e4m3fn": "torchao FP8", "uint4": "torchao 4-bit", "uint8": "torchao 8-bit"}[code]
    result = QuantisedState(parameter.name, stem, title, parts)
    if codes.size != (-(-size // 2) if is_half else size) or not scales.size or size % scales.size:
        return replace(result, problem=f"has {codes.size:,} codes and {scales.size:,} scales for {size:,} values")
    return _decoded(result, parameter, code, size // scales.size)


def _of_bitsandbytes(parameter: Parameter, own: str, number: str) -> QuantisedState:
    states, size = parameter.states, parameter.weight.size
    parts = (own, f"absmax{number}", f"qmap{number}")
    plain = _MOMENTS[own] if "state2" in states else own
    result = QuantisedState(
        parameter.name, plain, "bitsandbytes 8-bit", tuple(name for name in parts if name in states)
    )
    if missing := [name for name in parts if name not in states]:
        return replace(result, problem=f"has no `{missing[0]}`: 8 bits without blocks are not decoded")
    if states[own].size != size:
        return replace(result, problem=f"has {states[own].size:,} codes for {size:,} values")
    count = states[parts[1]].size
    block = next((block for block in _BLOCKS_OF_BITSANDBYTES if -(-size // block) == count), None)
    if block is None:
        return replace(result, problem=f"has {count:,} scales for {size:,} values: the size of blocks is not known")
    return _decoded(result, parameter, "uint8", block)


def _decoded(state: QuantisedState, parameter: Parameter, code: str, block: int) -> QuantisedState:
    try:
        scheme = FlatBlocks(parameter.weight.shape, block, code)
        flat = [with_shape(parameter.states[name], (parameter.states[name].size,)) for name in state.parts]
        tensor = quantised_tensor(scheme, tuple(flat))
    except (CodecError, CkptError) as error:
        return replace(state, problem=f"does not fit its scheme: {error}")
    return replace(state, bits=scheme.code_bits, tensor=tensor)


def with_plain_states(source: Checkpoint, states: tuple[QuantisedState, ...]) -> Checkpoint:
    """The checkpoint with these states plain, those that are decoded. bitsandbytes' moments get PyTorch's names."""
    by_name: dict[str, list[QuantisedState]] = {}
    for one in states:
        if one.tensor is not None:
            by_name.setdefault(one.parameter, []).append(one)
    has_moments = any(one.parts[0] in _MOMENTS and one.name != one.parts[0] for own in by_name.values() for one in own)
    parameters = dict(source.parameters)
    removed: set[tuple[str, str]] = set()
    for name, parameter in source.parameters.items():
        own = by_name.get(name, [])
        if own or (has_moments and _MOMENTS.keys() <= parameter.states.keys()):
            parameters[name] = plain = _plain(parameter, own, has_moments)
            removed |= {
                (name, state) for state in parameter.states if plain.states.get(state) is not parameter.states[state]
            }
    return replace(
        source,
        parameters=parameters,
        digests={key: digest for key, digest in source.digests.items() if key not in removed},
        errors={key: figures for key, figures in source.errors.items() if key not in removed},
    )


def _plain(parameter: Parameter, own: list[QuantisedState], has_moments: bool) -> Parameter:
    owners = {part: one for one in own for part in one.parts}
    is_pair = has_moments and _MOMENTS.keys() <= parameter.states.keys()
    states: dict[str, Tensor] = {}
    for state, tensor in parameter.states.items():
        one = owners.get(state)
        if one is None:
            title = _MOMENTS.get(state, state) if is_pair and is_float(tensor.dtype) else state
            states[title] = tensor
        elif state == one.parts[0] and one.tensor is not None:
            states[one.name] = Tensor.of(ComputedBlob(one.tensor, parameter.name))
    values = {
        key: value for key, value in parameter.values.items() if key not in {f"{one.name}.{_OBJECT}" for one in own}
    }
    return replace(parameter, states=states, values=values)


def dequantised_states(source: Checkpoint) -> Checkpoint:
    """The checkpoint with plain states, float32, and notices of them.

    Raises `UnsupportedError` for a state that is not decoded.
    """
    states = quantised_states(source)
    if not states:
        return source
    if (first := next((one for one in states if one.tensor is None), None)) is not None:
        raise UnsupportedError(
            f"quantised states of the optimizer cannot be dequantised: `{printable(first.name)}` of "
            f"`{printable(first.parameter)}` {first.problem}",
            where=source.path,
            hint="Without --dtype, codes and scales are copied as they are; --model-only leaves states out.",
        )
    notices = [
        Notice(
            f"states of the optimizer dequantised from {scheme} to float32: {', '.join(map(printable, names))}",
            tuple(dict.fromkeys(one.parameter for one in states if one.scheme == scheme)),
        )
        for scheme, names in _names_by_scheme(states).items()
    ]
    plain = with_plain_states(source, states)
    return replace(plain, notices=tuple(dict.fromkeys((*plain.notices, *notices))))


def _names_by_scheme(states: tuple[QuantisedState, ...]) -> Mapping[str, list[str]]:
    names: dict[str, list[str]] = {}
    for one in states:
        own = names.setdefault(one.scheme, [])
        if one.name not in own:
            own.append(one.name)
    return names
