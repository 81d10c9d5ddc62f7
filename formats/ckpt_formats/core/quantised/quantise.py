"""Quantised weights instead of plain ones: which weights, under which names, and what the configuration states."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_codecs.quantised.fp4 import MX_BLOCK
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Edit, Parameter
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.quantised.encoded import (
    BLOCK,
    Fp8CodesBlob,
    Fp8ScalesBlob,
    Mxfp4CodesBlob,
    Mxfp4Layout,
    Mxfp4ScalesBlob,
)
from ckpt_formats.core.quantised.weights import CONFIGS, described, quantised_weights
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value

GGUF_SCHEME = "q8_0"
"""Blocks of GGUF files, which only the format `gguf` writes."""
_PLAIN = re.compile(
    r"(?:^|\.)(?:lm_head|output_layer|output|score|classifier|embed\w*|\w*embeddings?|wte|wpe|shared|router|gate"
    r"|shared_expert_gate|\w*norm\w*|ln_\w+)\.weight$"
)
"""Matrices that quantised models leave plain: embeddings, the head, routers."""
_STACK = re.compile(r"(?:.+\.)?mlp\.experts\.(?:gate_up|down)_proj")
"""The experts of GPT-OSS: (experts, in, out)."""
_NAMES_IN_CONFIG = 100_000


@dataclass(frozen=True)
class Quantise(Edit):
    """Weights as codes and scales."""

    scheme: str
    plain: tuple[str, ...]


@dataclass(frozen=True)
class WrittenScheme:
    """A scheme that ckpt writes."""

    accepts: Callable[[Parameter], bool]
    """Whether the weight has the shape and the name of those that this scheme quantises."""
    encode: Callable[[str, Tensor], Mapping[str, Tensor]]
    """The stored parts by their names, from the name of a weight and its values."""
    table: Callable[[Sequence[str]], dict[str, Value]]
    """What the configuration states, from the modules of matrices that stay plain."""


def _is_linear(parameter: Parameter) -> bool:
    weight = parameter.weight
    is_matrix = parameter.role != "extra" and len(weight.shape) == 2 and is_float(weight.dtype) and weight.size > 0
    return is_matrix and parameter.name.endswith(".weight") and not _PLAIN.search(parameter.name)


def _is_stack(parameter: Parameter) -> bool:
    weight = parameter.weight
    is_stack = parameter.role != "extra" and len(weight.shape) == 3 and is_float(weight.dtype) and weight.size > 0
    return is_stack and _STACK.fullmatch(parameter.name) is not None


def _fp8(name: str, base: Tensor) -> Mapping[str, Tensor]:
    grid = tuple(-(-n // BLOCK) for n in base.shape)
    codes = Tensor.of(Fp8CodesBlob(base, Box.whole(base.shape), name))
    return {name: codes, f"{name}_scale_inv": Tensor.of(Fp8ScalesBlob(base, Box.whole(grid), name))}


def _fp8_table(plain: Sequence[str]) -> dict[str, Value]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(plain),
    }


def _mxfp4(layout: Mxfp4Layout, endings: tuple[str, str], name: str, base: Tensor) -> Mapping[str, Tensor]:
    codes = Mxfp4CodesBlob(base, Box.whole(layout.codes(base.shape)), name, layout)
    scales = Mxfp4ScalesBlob(base, Box.whole(layout.scales(base.shape)), name, layout)
    return {name + endings[0]: Tensor.of(codes), name + endings[1]: Tensor.of(scales)}


def _mxfp4_of_experts(name: str, base: Tensor) -> Mapping[str, Tensor]:
    """As GPT-OSS stores its experts."""
    return _mxfp4(Mxfp4Layout(is_stack=True), ("_blocks", "_scales"), name, base)


def _mxfp4_of_matrices(name: str, base: Tensor) -> Mapping[str, Tensor]:
    """As compressed-tensors stores linear layers, in its format `mxfp4-pack-quantized`."""
    return _mxfp4(Mxfp4Layout(is_stack=False), ("_packed", "_scale"), name, base)


def _mxfp4_table_of_experts(plain: Sequence[str]) -> dict[str, Value]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(plain)}


def _mxfp4_table_of_matrices(plain: Sequence[str]) -> dict[str, Value]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_BLOCK, "symmetric": True}
    weights |= {"dynamic": False, "scale_dtype": "torch.uint8"}
    kind = "mxfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": kind}},
        "ignore": list(plain),
    }


_SCHEMES = {
    "fp8-block": WrittenScheme(_is_linear, _fp8, _fp8_table),
    "mxfp4": WrittenScheme(
        lambda one: _is_linear(one) and one.weight.shape[1] % MX_BLOCK == 0,
        _mxfp4_of_matrices,
        _mxfp4_table_of_matrices,
    ),
}
SCHEMES_TO_WRITE = tuple(_SCHEMES)
_MXFP4_OF_EXPERTS = WrittenScheme(_is_stack, _mxfp4_of_experts, _mxfp4_table_of_experts)


def quantised(source: Checkpoint, scheme: str, plain: Sequence[str] = ()) -> Checkpoint:
    """See `Checkpoint.quantise`."""
    if scheme == GGUF_SCHEME:
        raise InvalidArgumentError(
            f"{scheme} is written by the format gguf alone", hint="Save with `Gguf(outtype='q8_0')`: --to gguf."
        )
    if scheme not in _SCHEMES:
        raise InvalidArgumentError(
            f"{scheme!r:.40} is not a scheme that ckpt writes; it writes {', '.join(SCHEMES_TO_WRITE)}"
        )
    for pattern in plain:
        safe_pattern(pattern, "--leave-plain")
        if not any(search(pattern, name) for name in source.parameters):
            raise NoMatchError(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
    if weights := quantised_weights(source):
        raise UnsupportedError(
            f"{described(weights)} cannot be quantised again", where=source.path, hint="Add --dtype fp32."
        )
    of_experts = scheme == "mxfp4" and _config(source).get("model_type") == "gpt_oss"
    own = _MXFP4_OF_EXPERTS if of_experts else _SCHEMES[scheme]
    chosen = {
        name: own
        for name, one in source.parameters.items()
        if own.accepts(one) and not any(search(pattern, name) for pattern in plain)
    }
    _check(source, chosen)
    if of_experts:
        _check_experts(source, chosen)
    parameters = dict[str, Parameter]()
    for name, parameter in source.parameters.items():
        if name not in chosen:
            parameters[name] = parameter
            continue
        for part, tensor in own.encode(name, parameter.states.get(MASTER, parameter.weight)).items():
            parameters[part] = replace(parameter, name=part, states={MODEL: tensor}, values={})
    if len(parameters) != len(source.parameters) + len(chosen):
        raise UnsupportedError("has tensors with the names of codes or scales", where=source.path)
    return replace(
        source,
        parameters=parameters,
        extras=_with_config(source, chosen, own),
        notices=tuple(dict.fromkeys((*source.notices, *_notices(source, chosen, scheme)))),
        digests={key: digest for key, digest in source.digests.items() if key[0] not in chosen},
        errors={key: figures for key, figures in source.errors.items() if key[0] not in chosen},
        history=(*source.history, Quantise(scheme, tuple(plain))),
    )


def _config(source: Checkpoint) -> Mapping[str, Value]:
    config = source.extras.get(CONFIGS[0])
    return config if isinstance(config, dict) else {}


def _check(source: Checkpoint, chosen: Collection[str]) -> None:
    """Raise `UnsupportedError` if these weights cannot be codes."""
    if not chosen:
        raise UnsupportedError("has no matrices of linear layers to quantise", where=source.path)
    trained = next((n for n in chosen if source.parameters[n].states.keys() - {MASTER, MODEL}), None)
    if trained is not None:
        raise UnsupportedError(
            f"`{printable(trained)}` has states of an optimizer, which codes cannot have",
            where=source.path,
            hint="Add --model-only.",
        )
    tied = next((alias for alias, name in source.aliases.items() if name in chosen), None)
    if tied is not None:
        raise UnsupportedError(
            f"`{printable(tied)}` is tied to a weight that would be quantised",
            where=source.path,
            hint="Name the weight with --leave-plain.",
        )


def _check_experts(source: Checkpoint, chosen: Collection[str]) -> None:
    """Raise `UnsupportedError` if transformers could not read these experts as MXFP4."""
    for name in chosen:
        module, shape = name.rpartition(".")[0], source.parameters[name].weight.shape
        if shape[1] % MX_BLOCK:
            raise UnsupportedError(
                f"`{printable(name)}` has {shape[1]} inputs, which are not whole groups of {MX_BLOCK}",
                where=source.path,
            )
        pair = (f"{module}.gate_up_proj", f"{module}.down_proj")
        if missing := [other for other in pair if other not in chosen]:
            raise UnsupportedError(
                f"`{printable(missing[0])}` stays plain beside `{printable(name)}`, which transformers does not read",
                where=source.path,
                hint=f"Leave all of `{printable(module)}` plain with --leave-plain, or nothing of it.",
            )


def _with_config(source: Checkpoint, chosen: Collection[str], own: WrittenScheme) -> dict[str, Value]:
    """The extras, with a configuration that states the quantisation."""
    extras: dict[str, Value] = dict(source.extras)
    if isinstance(extras.get(CONFIGS[0]), dict):
        others = [
            name.removesuffix(".weight")
            for name, one in source.parameters.items()
            if name not in chosen and name.endswith(".weight") and one.role != "extra" and len(one.weight.shape) == 2
        ]
        others += [name.rpartition(".")[0] for name in _plain_stacks(source, chosen) if name.endswith("down_proj")]
        extras[CONFIGS[0]] = {**_config(source), "quantization_config": own.table(others[:_NAMES_IN_CONFIG])}
    return extras


def _plain_stacks(source: Checkpoint, chosen: Collection[str]) -> list[str]:
    """Stacks of experts that stay plain."""
    named = (one for name, one in source.parameters.items() if name not in chosen and "experts" in name)
    return [one.name for one in named if len(one.weight.shape) == 3 and is_float(one.weight.dtype)]


def _notices(source: Checkpoint, chosen: Collection[str], scheme: str) -> list[Notice]:
    count = f"{len(chosen):,} weight{'s' * (len(chosen) != 1)}"
    notices = [Notice(f"quantised to {scheme}, values are rounded: {count}", tuple(chosen))]
    shapes = {name: source.parameters[name].weight.shape for name in chosen}
    if scheme == "fp8-block":
        ragged = [name for name, shape in shapes.items() if any(n % BLOCK for n in shape)]
        text = "with smaller blocks at their ends, which transformers does not read"
    else:
        others = (one for name, one in source.parameters.items() if name not in chosen and _is_linear(one))
        ragged = [one.name for one in others if one.weight.shape[1] % MX_BLOCK]
        text = f"left plain, because their rows are not whole groups of {MX_BLOCK} values"
    if ragged:
        notices.append(Notice(text, tuple(ragged)))
    if stacks := _plain_stacks(source, chosen):
        notices.append(Notice("stacks of experts stay plain", tuple(stacks)))
    if not _config(source):
        notices.append(Notice("there is no config.json that could state the quantisation"))
    return notices
