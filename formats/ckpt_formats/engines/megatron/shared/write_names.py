"""What a run's own layers call their parameters: the inverse of `names`.

Megatron core's plain layers have the names that are used here. Transformer Engine's keep the norm before a
projection inside it; grouped experts have a tensor for each expert of a projection, or one for all of them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import FlatRangeBlob, Fragment, Tensor
from ckpt_formats.core.views import reshaped
from ckpt_formats.engines.megatron.shared.split import LocalParameter
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.names.views import transposed

Experts = Literal["single", "grouped", "joined"]

_NORM = re.compile(r"(.*\.layers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)")
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.local_experts\.(?P<expert>\d+)\.(?P<part>linear_fc[12])\.(?P<kind>.*)")
_INSIDE = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}


def expert_storage(target: WriteLayout) -> Experts:
    """How the run's layers keep experts."""
    if not target.args.flag("moe_grouped_gemm"):
        return "single"
    return "grouped" if target.fused_norms and not target.args.flag("moe_use_legacy_grouped_gemm") else "joined"


def as_saved(target: WriteLayout, chunk: Sequence[LocalParameter]) -> list[LocalParameter]:
    """A model chunk's parameters under the names that its module gives them, in its order."""
    if target.fused_norms:
        local_names = {one.local for one in chunk}
        chunk = [replace(one, local=_with_norms_inside(one.local, local_names)) for one in chunk]
    storage = expert_storage(target)
    if storage == "grouped":
        return [replace(one, local=grouped(one.local)) for one in chunk]
    return list(_joined(chunk)) if storage == "joined" else list(chunk)


def grouped(name: str) -> str:
    """The name of an expert's tensor among grouped ones.

    >>> grouped("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight")
    'decoder.layers.0.mlp.experts.linear_fc2.weight1'
    """
    match = _EXPERT.fullmatch(name)
    return f"{match['layer']}.{match['part']}.{match['kind']}{match['expert']}" if match else name


def _with_norms_inside(name: str, local_names: set[str]) -> str:
    """Only a dense layer's norm is inside `linear_fc1`, and latent attention begins with several projections."""
    match = _NORM.fullmatch(name)
    if match is None:
        return name
    inside = f"{match[1]}{_INSIDE[match[2]]}"
    return f"{inside}.layer_norm_{match[3]}" if f"{inside}.weight" in local_names else name


def _joined(chunk: Sequence[LocalParameter]) -> Iterable[LocalParameter]:
    """With all experts of a rank in one tensor for each projection."""
    experts: dict[str, list[LocalParameter]] = {}
    for one in chunk:
        if match := _EXPERT.fullmatch(one.local):
            if match["kind"] != "weight":
                raise Unsupported(f"`{one.name}`: experts that are kept in one tensor have no biases")
            experts.setdefault(_joined_name(match), []).append(one)
    for one in chunk:
        match = _EXPERT.fullmatch(one.local)
        if match is None:
            yield one
        elif all_of := experts.pop(_joined_name(match), None):
            first = all_of[0]
            states = {s: _side_by_side([e.states[s] for e in all_of], match["part"]) for s in _shared(all_of)}
            yield replace(first, local=_joined_name(match), states=states)


def _joined_name(match: re.Match[str]) -> str:
    return f"{match['layer']}.weight{match['part'].removeprefix('linear_fc')}"


def _shared(experts: Sequence[LocalParameter]) -> list[str]:
    """The states of several experts, which one tensor is to hold. Raises `Unsupported` if they differ."""
    first = experts[0]
    for one in experts:
        if one.states.keys() != first.states.keys() or dict(one.values) != dict(first.values):
            raise Unsupported(f"`{one.name}` and `{first.name}` go into one tensor, but have other optimizer states")
    return list(first.states)


def _side_by_side(experts: Sequence[Tensor], part: str) -> Tensor:
    """One tensor of several experts: each is transposed in memory, one behind the other, whatever the shape says."""
    first = experts[0]
    if len(first.shape) != 2:
        return first
    rows, columns = first.shape[::-1]
    shape = (rows, len(experts) * columns) if part == "linear_fc1" else (len(experts) * rows, columns)
    runs = (
        Fragment(Box((i * first.size,), ((i + 1) * first.size,)), FlatRangeBlob(transposed(one), 0, first.size))
        for i, one in enumerate(experts)
    )
    return reshaped(Tensor((len(experts) * first.size,), first.dtype, tuple(runs)), 0, shape)
