"""The order in which Megatron's modules register their parameters, for checkpoints that do not store it.

The distributed optimizer's buffers have this order. Legacy files list the model's tensors in it, distributed
checkpoints do not. Source: the constructors in Megatron core. `master_check` finds a wrong order, because masters must
round to the weights.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_formats.core.errors import UnsupportedError

_TABLES = (
    (r"embedding\.word_embeddings", r"embedding\.position_embeddings", r"embedding\.tokentype_embeddings"),
    (),  # the decoder's layers
    (r"decoder\.final_(?:layer)?norm",),
    (),  # the layers for multi-token prediction
    (r"output_layer",),
)
"""The modules outside layers, by section of the model."""
_DECODER, _PREDICTION = (i for i, table in enumerate(_TABLES) if not table)
_LAYER = (
    r"input_layernorm",
    r"self_attention\.core_attention",
    r"self_attention\.linear_proj",
    r"input_layernorm",
    r"self_attention\.linear_qkv",
    r"self_attention\.linear_q_proj",
    r"self_attention\.linear_q_down_proj",
    r"self_attention\.q_layernorm",
    r"self_attention\.linear_q_up_proj",
    r"self_attention\.linear_kv_down_proj",
    r"self_attention\.kv_layernorm",
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
"""The modules of a layer. A norm that may be inside the projection after it is listed twice."""
_INSIDE = {r"input_layernorm": 3, r"self_attention\.q_layernorm": 7, r"self_attention\.kv_layernorm": 10}
"""Norms that may be inside a projection, and their place there."""
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_MODULES_OF_PREDICTION = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_IN_PREDICTION = re.compile(rf"mtp\.layers\.(\d+)\.({'|'.join(_MODULES_OF_PREDICTION)})\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


@dataclass(frozen=True)
class ModuleOrder:
    """The arguments of the run that determine the order."""

    fused_norms: bool = False
    """True if a norm is a part of the projection after it, as in Transformer Engine's layers."""
    grouped_experts: bool = False
    """True if experts are stored by projection, not one after the other."""
    latent: bool = False
    """True if attention is latent: then the norm before attention is never a part of a projection."""

    def ordered(self, names: Iterable[str]) -> list[str]:
        """The names in the order of the module. Raises `UnsupportedError` if the place of a name is not known."""
        return sorted(names, key=self._place)

    def _place(self, name: str) -> tuple[int, ...]:
        """The place of a parameter. Places are compared number by number."""
        place: tuple[int, ...] | None = None
        if match := _IN_LAYER.fullmatch(name):
            place = self._within_layer(match[2], (_DECODER, int(match[1])))
        elif match := _IN_PREDICTION.fullmatch(name):
            module = _MODULES_OF_PREDICTION.index(match[2])
            place = (_PREDICTION, int(match[1]), module)
            place = self._within_layer(match[3], place) if match[2] == "transformer_layer" else place
        else:
            sections = ((section, i, p) for section, table in enumerate(_TABLES) for i, p in enumerate(table))
            for section, i, pattern in sections:
                if re.fullmatch(rf"{pattern}\.(?:weight|bias)", name):
                    place = (section, i, int(name.endswith(".bias")))
        if place is None:
            raise UnsupportedError(
                f"the optimizer's states have no names, and the place of `{name}` among them is not known",
                hint="Save with --ckpt-format torch, or with --dist-ckpt-optim-fully-reshardable.",
            )
        return place

    def _within_layer(self, name: str, layer: tuple[int, ...]) -> tuple[int, ...] | None:
        """The place of a parameter in a layer; None if it is not known."""
        if expert := _EXPERT.fullmatch(name):
            numbers = (int(expert[1]), int(expert[2] == "linear_fc2"))
            numbers = numbers[::-1] if self.grouped_experts else numbers
            return *layer, _LAYER.index(r"mlp\.experts"), *numbers, int(expert[3] == "bias")
        for i, pattern in enumerate(_LAYER):
            inside = _INSIDE.get(pattern)
            if inside is not None and (i == inside) != (self.fused_norms and self.latent != (inside == 3)):
                continue
            if re.fullmatch(rf"{pattern}(?:\..*)?", name):
                return *layer, i, int(name.endswith("bias"))  # a weight comes before its bias
        return None
