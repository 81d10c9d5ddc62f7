"""The keys of a `torch_dist` checkpoint, as in Megatron's `sharded_state_dict`: the inverse of `model`.

Layers of the same kind are stacked: they share a key, and the first axis is their number. Experts are stacked along
the next axis. If Megatron's arguments allow layers of several kinds, each layer has its own keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.names import expert_of
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.torch_dist.optimizer import WRAPPER

MIXED = "non_homogeneous_layers"
"""The entry of `content_metadata` that states that each layer has its own keys."""
_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(.*)")
_NORM = re.compile(r"(.*\.layers\.\d+\.(?:.*\.)?)((?:q|kv|input|pre_mlp)_layernorm)\.(weight|bias)")
_LATENT = "self_attention.linear_kv_up_proj.weight"


@dataclass(frozen=True)
class Key:
    """The key of a tensor, and its place along the axes of a stack: () if the key is not a stack."""

    text: str
    place: Shape = ()
    lengths: Shape = ()

    def object(self, kind: str = "") -> str:
        """The key of an object at this place: `...linear_qkv._extra_state/shard_3_32`."""
        place, lengths = (".".join(map(str, numbers)) for numbers in (self.place or (0,), self.lengths or (1,)))
        return f"{self.text}{kind}/shard_{place}_{lengths}"


@dataclass(frozen=True)
class Keys:
    """The keys of a target."""

    target: WriteLayout

    def of(self, name: str) -> Key:
        """The key for a tensor of the full model, or for a module's extra state."""
        name = self._as_inside(name)
        place: Shape = ()
        lengths: Shape = ()
        if not self.mixed and (layer := _LAYER.fullmatch(name)):
            name, place, lengths = layer[1] + layer[3], (int(layer[2]),), (len(self._layers[layer[1]]),)
        if expert := _EXPERT.fullmatch(name):
            name = f"{expert[1]}experts.{expert[3]}"
            place, lengths = (*place, int(expert[2])), (*lengths, self._experts)
        return Key(f"{self._wrapper}{name}", place, lengths)

    @property
    def _wrapper(self) -> str:
        """The prefix of all keys, if the source has it."""
        return WRAPPER if self.target.source.origin.layout.get("wrapped") is True else ""

    @cached_property
    def mixed(self) -> bool:
        """True if each layer has its own keys, because layers may be of several kinds."""
        return self._stated_mixed or self.differing

    @cached_property
    def differing(self) -> bool:
        """True if layers differ although the arguments do not allow it.

        The checkpoint's metadata must state it then.
        """
        if self._stated_mixed:
            return False
        return any(
            sorted(stack) != list(range(len(stack))) or any(forms != stack[0] for forms in stack.values())
            for stack in self._layers.values()
        )

    @property
    def _stated_mixed(self) -> bool:
        """True if the arguments allow layers of several kinds. Source:
        Megatron core, `TransformerBlock`, `MambaStack`."""
        record, extras = self.target.args.record, self.target.source.extras
        content = extras.get("content_metadata")
        return (
            any(_varies(record.get(f"{kind}_freq")) for kind in ("moe_layer", "linear_attention"))
            or any(record.get(f"heterogeneous_layers_config_{kind}") for kind in ("path", "encoded_json"))
            or self.target.args.flag("hetereogenous_dist_checkpoint")
            or (isinstance(content, dict) and bool(content.get(MIXED)))
            or any(".mixer." in name for name in self.target.source.parameters)
        )

    @cached_property
    def _layers(self) -> Mapping[str, Mapping[int, set[tuple[str, Shape]]]]:
        """The names and shapes in each layer, by stack of layers and number of the layer."""
        stacks: dict[str, dict[int, set[tuple[str, Shape]]]] = {}
        for name, parameter in self.target.source.parameters.items():
            if (match := _LAYER.fullmatch(name)) and parameter.role != "extra":
                forms = stacks.setdefault(match[1], {}).setdefault(int(match[2]), set())
                forms.add((match[3], parameter.weight.shape))
        return stacks

    @cached_property
    def _experts(self) -> int:
        numbers = (n for name in self.target.source.parameters if (n := expert_of(name)) is not None)
        return 1 + max(numbers, default=self.target.args.number("num_experts", default=1) - 1)

    def _as_inside(self, name: str) -> str:
        """The name of a norm inside the projection after it, if some class of Megatron's layers has it there."""
        match = _NORM.fullmatch(name)
        if match is None:
            return name
        layer, norm, kind = match.groups()
        if norm in ("q_layernorm", "kv_layernorm"):  # of latent attention: Megatron has no common key for both places
            up = f"{layer}linear_{norm.removesuffix('_layernorm')}_up_proj"
            inside = self.target.fused_norms and f"{up}.weight" in self.target.source.parameters
            return f"{up}.layer_norm_{kind}" if inside else name
        attention = norm == "input_layernorm"
        projection = layer + ("self_attention.linear_qkv" if attention else "mlp.linear_fc1")
        has = self.target.source.parameters
        # Only Transformer Engine distinguishes a norm before experts from one before a dense MLP. No layer class has
        # the norm before latent attention inside a projection, and plain layers with latent attention have no norm
        # inside any projection.
        by_projection = attention or self.target.fused_norms
        inside = f"{projection}.weight" in has if by_projection else f"{layer}{_LATENT}" not in has
        return f"{projection}.layer_norm_{kind}" if inside else name


def _varies(frequency: Value) -> bool:
    """True if the frequency selects some layers: every n-th one with n > 1, or a pattern."""
    return isinstance(frequency, (list, tuple, str)) or (isinstance(frequency, int) and frequency > 1)
