"""Names of Megatron's parameters: from those of one model chunk to those of the whole model.

Layers are numbered from 0 in each chunk, experts in each rank. Which class
implements a layer shows in its names: Transformer Engine's fused layers keep the
norm before a projection inside it, and experts come one by one, or grouped. All
become the names of the plain (`local`) layers, with the whole model's numbers:
the names that Megatron's own distributed checkpoints treat as the same, too.

    layers.0.self_attention.linear_qkv.layer_norm_weight -> layers.12.input_layernorm.weight
    layers.0.mlp.experts.linear_fc1.weight1              -> layers.12.mlp.experts.local_experts.5.linear_fc1.weight
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_formats.core.errors import Corrupt, Unsupported
from ckpt_formats.core.tensor import FileBlob, Tensor, is_c_order
from ckpt_formats.core.views import reshaped, transposed, unstacked

WORD_TABLE = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
TIED = {
    HEAD: WORD_TABLE,
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
    "word_embeddings.weight": "language_model.embedding.word_embeddings.weight",
}
"""The names that the last stage gives its copy of a tied table."""

_LAYER = re.compile(r"((?:language_model\.)?(?:decoder|encoder|transformer)\.layers\.)(\d+)(\..*)")
_STACKED_LAYER = re.compile(r"(?P<head>(?:decoder|encoder)\.layers\.)(?!\d+\.)(?P<rest>.*)")
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_JOINED = re.compile(r"(.*\.experts)\.weight([12])")
_BUFFER = re.compile(r".*\.(expert_bias|local_tokens_per_expert|global_tokens_per_expert|inv_freq)")


def layer_of(name: str) -> int | None:
    """The number of the layer in a name."""
    match = _LAYER.fullmatch(name)
    return int(match[2]) if match else None


def in_layer(name: str, layer: int) -> str:
    """The same name with another number of its layer."""
    return _LAYER.sub(lambda match: f"{match[1]}{layer}{match[3]}", name)


def is_expert(name: str) -> bool:
    """Is it a parameter of one expert, not of one that all tokens share?"""
    return ".experts." in name


def expert_of(name: str) -> int | None:
    """The number of the expert that a parameter is of."""
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else None


def in_expert(name: str, expert: int) -> str:
    """The same name with another number of its expert."""
    return _EXPERT.sub(lambda match: f"{match[1]}{expert}{match[3]}", name)


def is_buffer(name: str) -> bool:
    """Is it a tensor that the optimizer does not know?"""
    return _BUFFER.fullmatch(name) is not None


def is_extra_state(name: str) -> bool:
    return name.endswith("_extra_state")


@dataclass(frozen=True)
class Naming:
    """How the names of one chunk become those of the whole model."""

    first_layer: int = 0
    first_expert: int = 0
    experts: int = 0
    """Of this rank."""

    def plain(self, name: str) -> str:
        """The name in the whole model of one chunk's tensor, or of its extra state."""
        layer = layer_of(name)
        if layer is not None:
            name = in_layer(name, layer + self.first_layer)
        for fused, norm in _FUSED_NORMS:
            name = name.replace(fused, norm)
        expert = expert_of(name)
        if expert is not None:
            return in_expert(name, expert + self.first_expert)
        if match := _GROUPED.fullmatch(name):
            expert = int(match[4]) + self.first_expert
            return f"{match[1]}.local_experts.{expert}.{match[2]}.{match[3]}"
        return name

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor of one chunk under its names in the whole model: several, if it holds several experts."""
        name = self.plain(name)
        match = _JOINED.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        if len(tensor.shape) != 2 or not self.experts:
            raise Corrupt(f"`{name}` of shape {list(tensor.shape)} does not hold {self.experts} experts")
        first = match[2] == "1"
        # Whatever its nominal shape, the first is [expert, hidden, ffn] in memory, the second [expert, ffn, hidden].
        hidden, total = tensor.shape if first else tensor.shape[::-1]
        each = total // self.experts
        shape = (self.experts, hidden, each) if first else (self.experts, each, hidden)
        if each * self.experts != total:
            raise Corrupt(f"`{name}` of shape {list(tensor.shape)} does not divide into {self.experts} experts")
        flat = reshaped(_flat(tensor), 0, shape)
        for i in range(self.experts):
            expert = f"{match[1]}.local_experts.{self.first_expert + i}.linear_fc{match[2]}.weight"
            yield expert, transposed(unstacked(flat, i))


def unstack(name: str) -> tuple[str, bool]:
    """A key of a distributed checkpoint as a name with the places `{layer}` and `{expert}`; is it by layer?

    >>> unstack("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ('decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight', True)
    """
    match = _STACKED_LAYER.fullmatch(name)
    if match:
        name = f"{match['head']}{{layer}}.{match['rest']}"
    for fused, norm in _FUSED_NORMS:
        name = name.replace(fused, norm)
    return name.replace(".experts.experts.", ".experts.local_experts.{expert}."), match is not None


def _flat(tensor: Tensor) -> Tensor:
    blob = tensor.fragments[0].blob if tensor.fragments else None
    if not isinstance(blob, FileBlob) or not is_c_order(blob.shape, blob.strides, blob.dtype.itemsize):
        raise Unsupported("the weights of all experts in one tensor, which is not stored in one piece")
    return Tensor.of(blob.shaped((tensor.size,)))
