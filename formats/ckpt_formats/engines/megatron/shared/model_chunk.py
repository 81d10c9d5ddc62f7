"""One model chunk of one rank: its tensors by their local names, in the module's order."""

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.names import is_buffer, is_expert, is_extra_state, layer_of
from ckpt_formats.state_dicts.leaves import named_leaves, non_tensor_items, tensor_leaf


@dataclass(frozen=True)
class ModelChunk:
    """The tensors and the extra states of a model chunk on one rank, by local names."""

    tensors: Mapping[str, Tensor]
    extra_states: Mapping[str, Value]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len({layer for name in self.tensors if (layer := layer_of(name)) is not None})

    @property
    def numel(self) -> int:
        """The number of elements of all trained parameters."""
        return sum(self.tensors[name].size for name in self.trained())

    def trained(self, *, experts: bool | None = None) -> list[str]:
        """The names of trained parameters, in the optimizer's order: of all, of experts (True) or of others (False)."""
        names = [name for name in self.tensors if not is_buffer(name)]
        return names if experts is None else [name for name in names if is_expert(name) == experts]


def chunk_of(state_dict: Mapping[Value, Value]) -> ModelChunk:
    """A model chunk from its state dict, which is flat, or nested before Megatron core."""
    tensors, extra = {}, {}
    for name, leaf in named_leaves(state_dict):
        if is_extra_state(name):
            extra[name] = leaf
        else:
            tensors[name] = tensor_leaf(leaf)
    return ModelChunk(tensors, extra | dict(non_tensor_items(state_dict)))
