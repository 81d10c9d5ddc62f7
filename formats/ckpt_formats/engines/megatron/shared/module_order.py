"""The order in which Megatron's modules register their parameters, for checkpoints that do not store it.

The distributed optimizer's buffers have this order. Legacy files list the model's tensors in it, distributed
checkpoints do not. Source: the constructors in Megatron core. `master_check` finds a wrong order, because masters must
round to the weights.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.engines.megatron.shared.names import layer_of

_BEFORE = (r"embedding\.word_embeddings", r"embedding\.position_embeddings", r"embedding\.tokentype_embeddings")
_AFTER = (r"decoder\.final_(?:layer)?norm", r"output_layer")
_LAYER = (
    r"input_layernorm",
    r"self_attention\.core_attention",
    r"self_attention\.linear_proj",
    r"input_layernorm",  # inside linear_qkv, in fused layers
    r"self_attention\.linear_qkv",
    r"self_attention\.linear_q_proj",
    r"self_attention\.linear_q_down_proj",
    r"self_attention\.linear_q_up_proj",
    r"self_attention\.linear_kv_down_proj",
    r"self_attention\.linear_kv_up_proj",
    r"self_attention\.(?:q|kv)_layernorm",
    r"self_attention\.k_layernorm",
    r"pre_mlp_layernorm",
    r"mlp\.linear_fc1",
    r"mlp\.linear_fc2",
    r"mlp\.router",
    r"mlp\.experts",
    r"mlp\.shared_experts\.gate_weight",
    r"mlp\.shared_experts\.linear_fc1",
    r"mlp\.shared_experts\.linear_fc2",
    r"mixer\.dt_bias",
    r"mixer\.A_log",
    r"mixer\.D",
    r"mixer\.in_proj",
    r"mixer\.conv1d",
    r"mixer\.norm",
    r"mixer\.out_proj",
    r"norm",
)
_IN_LAYER = re.compile(r"decoder\.layers\.\d+\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


@dataclass(frozen=True)
class ModuleOrder:
    """The arguments of the run that determine the order."""

    fused_norms: bool = False
    """True if the norm is a part of the projection after it, as in Transformer Engine's layers."""
    grouped_experts: bool = False
    """True if experts are stored by projection, not one after the other."""

    def ordered(self, names: Iterable[str]) -> list[str]:
        """The names in the order of the module. Raises `UnsupportedError` if the place of a name is not known."""
        return sorted(names, key=self._place)

    def _place(self, name: str) -> tuple[int, int, int, tuple[int, ...]]:
        layer = layer_of(name)
        if layer is None:
            for section, table in ((0, _BEFORE), (2, _AFTER)):
                for i, pattern in enumerate(table):
                    if match := re.fullmatch(rf"{pattern}\.(weight|bias)", name):
                        return section, 0, i, (int(match[1] == "bias"),)
        elif match := _IN_LAYER.fullmatch(name):
            if expert := _EXPERT.fullmatch(match[1]):
                place = (int(expert[1]), int(expert[2] == "linear_fc2"))
                place = place[::-1] if self.grouped_experts else place
                return 1, layer, _LAYER.index(r"mlp\.experts"), (*place, int(expert[3] == "bias"))
            for i, pattern in enumerate(_LAYER):
                if i == 0 and self.fused_norms:
                    continue
                if re.fullmatch(rf"{pattern}(?:\..*)?", match[1]):
                    return 1, layer, i, (self._within(match[1]),)
        raise UnsupportedError(
            f"the optimizer's states have no names, and the place of `{name}` among them is not known",
            hint="Save with --ckpt-format torch, or with --dist-ckpt-optim-fully-reshardable.",
        )

    def _within(self, name: str) -> int:
        """0 for a weight, 1 for a bias: a weight comes before its bias."""
        return int(name.endswith("bias"))
