"""The architecture of a decoder-only transformer: what Megatron's arguments and a config.json both state."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""SiLU implies a gate. `gelu_tanh` is GELU by the hyperbolic tangent, `gelu` by the error function."""


@dataclass(frozen=True)
class Scaling:
    """The scaling of rotary frequencies for longer contexts."""

    kind: Literal["linear", "llama3"]
    factor: float


@dataclass(frozen=True)
class Architecture:
    """The sizes and options of a model that the names of its tensors do not tell."""

    layers: int
    hidden: int
    ffn: int
    """The inner size of a feed-forward layer; of one expert, if there are experts."""
    heads: int
    groups: int
    """The number of groups of heads that share a key and a value."""
    head_dim: int
    vocabulary: int
    """The number of tokens: rows of the table without padding."""
    positions: int
    epsilon: float
    activation: Activation
    tied: bool
    theta: float | None
    """The base of rotary frequencies; None if positions are learned."""
    scaling: Scaling | None = None
    experts: int | None = None
    chosen: int | None = None
    """The number of experts that the router chooses for each token."""
    window: int | None = None
    """The number of tokens that a token attends to, including itself; None: all previous ones."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    std: float = 0.02
    """The standard deviation of the initial weights."""

    def differences(self, other: "Architecture") -> Iterator[str]:
        """The differences from another architecture: `theta 10000 and 500000`. Options of training are ignored."""
        for field in fields(self):
            value, other_value = getattr(self, field.name), getattr(other, field.name)
            if value != other_value and field.name not in ("dropout", "attention_dropout", "std"):
                yield f"{field.name} {value} and {other_value}"
