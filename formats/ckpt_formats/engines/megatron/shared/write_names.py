"""Translate parameter names to those of the run's own layers: the inverse of `names`.

Megatron core's plain layers have the names that are used here. Transformer Engine's layers have the norm inside the
projection after it. Grouped experts have a tensor for each expert of a projection, or one tensor for all experts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.views import flat_vector, reshaped, transposed
from ckpt_formats.engines.megatron.shared.split import LocalParameter
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout

Experts = Literal["single", "grouped", "joined"]

_NORM = re.compile(r"(.*\.layers\.\d+\.(?:.*\.)?)((?:q|kv|input|pre_mlp)_layernorm)\.(weight|bias)")
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.local_experts\.(?P<expert>\d+)\.(?P<part>linear_fc[12])\.(?P<kind>.*)")
_INSIDE = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "q_layernorm": "linear_q_up_proj",
    "kv_layernorm": "linear_kv_up_proj",
}


def expert_storage(target: WriteLayout) -> Experts:
    """The form of experts in the run's layers: single, grouped by projection, or joined in one tensor."""
    if not target.args.flag("moe_grouped_gemm"):
        return "single"
    return "grouped" if target.fused_norms and not target.args.flag("moe_use_legacy_grouped_gemm") else "joined"


def as_saved(target: WriteLayout, chunk: Sequence[LocalParameter]) -> list[LocalParameter]:
    """The parameters of a model chunk under the names of the run's modules, in their order."""
    if target.fused_norms:
        local_names = {parameter.local for parameter in chunk}
        chunk = [replace(parameter, local=_with_norms_inside(parameter.local, local_names)) for parameter in chunk]
    storage = expert_storage(target)
    if storage == "grouped":
        return [replace(parameter, local=grouped(parameter.local)) for parameter in chunk]
    return list(_joined(chunk)) if storage == "joined" else list(chunk)


def grouped(name: str) -> str:
    """The name of an expert's tensor if experts are grouped.

    >>> grouped("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight")
    'decoder.layers.0.mlp.experts.linear_fc2.weight1'
    """
    match = _EXPERT.fullmatch(name)
    return f"{match['layer']}.{match['part']}.{match['kind']}{match['expert']}" if match else name


def _with_norms_inside(name: str, local_names: set[str]) -> str:
    """The name of a norm inside the projection after it, if there is such a projection.

    A norm before experts stays outside, and so does a norm before latent attention, which has several projections.
    """
    match = _NORM.fullmatch(name)
    if match is None:
        return name
    inside = f"{match[1]}{_INSIDE[match[2]]}"
    return f"{inside}.layer_norm_{match[3]}" if f"{inside}.weight" in local_names else name


def _joined(chunk: Sequence[LocalParameter]) -> Iterable[LocalParameter]:
    """The parameters of a chunk, with one tensor of all experts for each projection.

    Raises `UnsupportedError` if experts have biases or different states.
    """
    experts: dict[str, list[LocalParameter]] = {}
    for parameter in chunk:
        if match := _EXPERT.fullmatch(parameter.local):
            if match["kind"] != "weight":
                raise UnsupportedError(f"`{parameter.name}`: experts that are joined in one tensor cannot have biases")
            experts.setdefault(_joined_name(match), []).append(parameter)
    for parameter in chunk:
        match = _EXPERT.fullmatch(parameter.local)
        if match is None:
            yield parameter
        elif all_of := experts.pop(_joined_name(match), None):
            first = all_of[0]
            states = {s: _side_by_side([e.states[s] for e in all_of], match["part"]) for s in _shared(all_of)}
            yield replace(first, local=_joined_name(match), states=states)


def _joined_name(match: re.Match[str]) -> str:
    return f"{match['layer']}.weight{match['part'].removeprefix('linear_fc')}"


def _shared(experts: Sequence[LocalParameter]) -> list[str]:
    """The names of the states of several experts.

    Raises `UnsupportedError` if experts have different states or values.
    """
    first = experts[0]
    for expert in experts:
        if expert.states.keys() != first.states.keys() or dict(expert.values) != dict(first.values):
            raise UnsupportedError(
                f"`{expert.name}` and `{first.name}` must be joined in one tensor, but have different optimizer states"
            )
    return list(first.states)


def _side_by_side(experts: Sequence[Tensor], part: str) -> Tensor:
    """One tensor of several experts: their transposed matrices concatenated in memory, which differs from its shape."""
    first = experts[0]
    if len(first.shape) != 2:
        return first
    rows, columns = first.shape[::-1]
    shape = (rows, len(experts) * columns) if part == "linear_fc1" else (len(experts) * rows, columns)
    runs = [(transposed(expert), 0, first.size, i * first.size) for i, expert in enumerate(experts) if first.size]
    return reshaped(flat_vector(runs, len(experts) * first.size, first.dtype), 0, shape)
