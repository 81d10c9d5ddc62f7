"""Translate parameter names of one model chunk to names of the full model.

In the files, layers are numbered from 0 in each chunk, and experts from 0 in each rank. The names also depend on the
class of the layer: Transformer Engine's fused layers have the norm inside the projection after it, and experts are
stored one by one or grouped. Here all names become those of the plain (`local`) layers, with the numbers of the full
model. Megatron's own distributed checkpoints treat these names as equal, too.

    layers.0.self_attention.linear_qkv.layer_norm_weight -> layers.12.input_layernorm.weight
    layers.0.mlp.experts.linear_fc1.weight1              -> layers.12.mlp.experts.local_experts.5.linear_fc1.weight
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.tensor import FileBlob, Tensor, is_c_order
from ckpt_formats.core.views import reshaped, transposed_in_file, unstacked

WORD_TABLE = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
TIED = {
    HEAD: WORD_TABLE,
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
    "word_embeddings.weight": "language_model.embedding.word_embeddings.weight",
}
"""The name of the last stage's copy of a tied table, and the name of the table."""

_LAYER = re.compile(r"((?:language_model\.)?(?:decoder|encoder|transformer)\.layers\.)(\d+)(\..*)")
_STACKED_LAYER = re.compile(r"(?P<head>(?:[a-z_]\w*\.){0,2}(?:decoder|encoder)\.layers\.)(?!\d+\.)(?P<rest>.*)")
_OTHER_MODEL = re.compile(r"(_?teacher_model|(vision|image|audio|sound)_(model|projection|encoder))\..*")
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_JOINED = re.compile(r"(.*\.experts)\.weight([12])")
_BUFFER = re.compile(r".*\.(expert_bias|local_tokens_per_expert|global_tokens_per_expert|inv_freq)")


def layer_of(name: str) -> int | None:
    """The number of the layer in a name, or None."""
    match = _LAYER.fullmatch(name)
    return int(match[2]) if match else None


def in_layer(name: str, layer: int) -> str:
    """The same name with the layer number `layer`."""
    return _LAYER.sub(lambda match: f"{match[1]}{layer}{match[3]}", name)


def is_expert(name: str) -> bool:
    """True if it is a parameter of a routed expert, not of a shared one."""
    return ".experts." in name


def expert_of(name: str) -> int | None:
    """The number of the expert in a name, or None."""
    match = _EXPERT.fullmatch(name)
    return int(match[2]) if match else None


def in_expert(name: str, expert: int) -> str:
    """The same name with the expert number `expert`."""
    return _EXPERT.sub(lambda match: f"{match[1]}{expert}{match[3]}", name)


def is_buffer(name: str) -> bool:
    """True if it is a buffer, which has no optimizer states."""
    return _BUFFER.fullmatch(name) is not None


def other_model(name: str) -> str | None:
    """The model of which a tensor is, if it is another than that whose sizes the arguments state; else None.

    Multimodal models have an encoder of pictures and a projection, a distilled model has its teacher.
    """
    match = _OTHER_MODEL.fullmatch(name)
    return None if match is None else match[1]


def is_extra_state(name: str) -> bool:
    """True if it is the extra state of a module."""
    return name.endswith("_extra_state")


@dataclass(frozen=True)
class Naming:
    """The translation of one chunk's names to names of the full model."""

    first_layer: int = 0
    first_expert: int = 0
    experts: int = 0
    """The number of experts on this rank."""

    def plain(self, name: str) -> str:
        """The name in the full model of a chunk's tensor or extra state."""
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

    def tensors(self, name: str, tensor: Tensor, *, is_weight: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the full model that a chunk's tensor contains: several if it has several experts.

        An optimizer state that is a single number, such as the step, is that of each expert.

        Raises: CorruptError if the shape does not fit the number of experts, UnsupportedError if it is not contiguous.
        """
        name = self.plain(name)
        match = _JOINED.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        names = [
            f"{match[1]}.local_experts.{self.first_expert + i}.linear_fc{match[2]}.weight" for i in range(self.experts)
        ]
        if tensor.shape == () and not is_weight:
            yield from ((expert, tensor) for expert in names)
            return
        if len(tensor.shape) != 2 or not self.experts:
            raise CorruptError(f"`{name}` of shape {list(tensor.shape)} does not contain {self.experts} experts")
        first = match[2] == "1"
        # The nominal shape is not that in memory: the first is (expert, hidden, ffn), the second (expert, ffn, hidden).
        hidden, total = tensor.shape if first else tensor.shape[::-1]
        each = total // self.experts
        shape = (self.experts, hidden, each) if first else (self.experts, each, hidden)
        if each * self.experts != total:
            raise CorruptError(f"`{name}` of shape {list(tensor.shape)} is not divisible by {self.experts} experts")
        flat = reshaped(_flat(tensor), 0, shape)
        yield from ((expert, transposed_in_file(unstacked(flat, i))) for i, expert in enumerate(names))


def unstack(name: str) -> tuple[str, bool]:
    """A key of a distributed checkpoint as a name with `{layer}` and `{expert}`, and whether the key stacks layers.

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
        raise UnsupportedError("the weights of all experts are one tensor, but it is not stored contiguously")
    return Tensor.of(blob.shaped((tensor.size,)))
