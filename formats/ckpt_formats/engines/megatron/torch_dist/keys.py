"""The keys of a `torch_dist` checkpoint, as Megatron's `sharded_state_dict` has them: the inverse of `dist_model`.

Layers that are all alike are stacked: they share a key, and a first axis counts them. So do experts, along the next
axis. Where Megatron's arguments allow layers of several kinds, each has keys of its own.
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
"""Says, in a checkpoint's `content_metadata`, that its layers have keys of their own."""
_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(.*)")
_NORM = re.compile(r"(.*\.layers\.\d+\.(?:.*\.)?)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)")
_LATENT = "self_attention.linear_kv_up_proj.weight"


@dataclass(frozen=True)
class Key:
    """The key of a tensor, and its place along the axes by which the key stacks several."""

    text: str
    place: Shape = ()
    lengths: Shape = ()

    def object(self, kind: str = "") -> str:
        """The key of an object at this place: `...linear_qkv._extra_state/shard_3_32`."""
        place, lengths = (".".join(map(str, numbers)) for numbers in (self.place or (0,), self.lengths or (1,)))
        return f"{self.text}{kind}/shard_{place}_{lengths}"


@dataclass(frozen=True)
class Keys:
    """The keys of one target."""

    target: WriteLayout

    def of(self, name: str) -> Key:
        """The key of a tensor of the whole model, or of a module's extra state."""
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
        """Before all keys, if the source's had it."""
        return WRAPPER if self.target.source.origin.layout.get("wrapped") is True else ""

    @cached_property
    def mixed(self) -> bool:
        """Have layers keys of their own, since they may be of several kinds?"""
        return self._said_mixed or self.unlike

    @cached_property
    def unlike(self) -> bool:
        """Do layers differ though the arguments do not say so? Then the checkpoint must."""
        if self._said_mixed:
            return False
        return any(
            sorted(stack) != list(range(len(stack))) or any(forms != stack[0] for forms in stack.values())
            for stack in self._layers.values()
        )

    @property
    def _said_mixed(self) -> bool:
        """Do the arguments allow layers of several kinds? Source: Megatron core, `TransformerBlock`, `MambaStack`."""
        record, extras = self.target.args.record, self.target.source.extras
        said = extras.get("content_metadata")
        return (
            any(_varies(record.get(f"{what}_freq")) for what in ("moe_layer", "linear_attention"))
            or any(record.get(f"heterogeneous_layers_config_{what}") for what in ("path", "encoded_json"))
            or self.target.args.flag("hetereogenous_dist_checkpoint")
            or (isinstance(said, dict) and bool(said.get(MIXED)))
            or any(".mixer." in name for name in self.target.source.parameters)
        )

    @cached_property
    def _layers(self) -> Mapping[str, Mapping[int, set[tuple[str, Shape]]]]:
        """Of each stack of layers: the form of each layer, its experts counted once."""
        found: dict[str, dict[int, set[tuple[str, Shape]]]] = {}
        for name, parameter in self.target.source.parameters.items():
            if (match := _LAYER.fullmatch(name)) and parameter.role != "extra":
                forms = found.setdefault(match[1], {}).setdefault(int(match[2]), set())
                forms.add((match[3], parameter.weight.shape))
        return found

    @cached_property
    def _experts(self) -> int:
        numbers = (n for name in self.target.source.parameters if (n := expert_of(name)) is not None)
        return 1 + max(numbers, default=self.target.args.number("num_experts", default=1) - 1)

    def _as_inside(self, name: str) -> str:
        """A norm before a projection is called as inside it, where some of Megatron's layers have it there."""
        match = _NORM.fullmatch(name)
        if match is None:
            return name
        layer, norm, kind = match.groups()
        attention = norm == "input_layernorm"
        projection = layer + ("self_attention.linear_qkv" if attention else "mlp.linear_fc1")
        has = self.target.source.parameters
        # Only Transformer Engine tells a norm before experts from one before a dense MLP. No layers have the norm
        # before latent attention inside, and the plain ones with latent attention none at all.
        by_projection = attention or self.target.fused_norms
        inside = f"{projection}.weight" in has if by_projection else f"{layer}{_LATENT}" not in has
        return f"{projection}.layer_norm_{kind}" if inside else name


def _varies(frequency: Value) -> bool:
    """Is it every n-th layer, or a pattern, and not every layer?"""
    return isinstance(frequency, (list, tuple, str)) or (isinstance(frequency, int) and frequency > 1)
