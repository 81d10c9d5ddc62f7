"""What a decoder-only transformer is, whoever runs it: what Megatron's arguments and a config.json both say."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""SiLU goes with a gate. `gelu_tanh` is GELU by the hyperbolic tangent, `gelu` by the error function."""


@dataclass(frozen=True)
class Scaling:
    """How rotary frequencies are stretched for longer texts."""

    how: Literal["linear", "llama3"]
    factor: float


@dataclass(frozen=True)
class Architecture:
    """The numbers and choices that no name of a tensor tells."""

    layers: int
    hidden: int
    ffn: int
    """Of an expert, if there are experts."""
    heads: int
    groups: int
    """Of heads that share a key and a value."""
    head_dim: int
    vocabulary: int
    """True rows, without padding."""
    positions: int
    epsilon: float
    activation: Activation
    tied: bool
    theta: float | None
    """The base of rotary frequencies; None: positions are learned."""
    scaling: Scaling | None = None
    experts: int | None = None
    chosen: int | None = None
    """Experts for each token."""
    window: int | None = None
    """How many tokens a token sees, itself among them; None: all before it."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    std: float = 0.02
    """Of the weights at the beginning."""

    def differences(self, other: "Architecture") -> Iterator[str]:
        """What another says otherwise, but for what only matters while training: `rotary base 10000 and 500000`."""
        for field in fields(self):
            value, other_value = getattr(self, field.name), getattr(other, field.name)
            if value != other_value and field.name not in ("dropout", "attention_dropout", "std"):
                yield f"{field.name} {value} and {other_value}"
