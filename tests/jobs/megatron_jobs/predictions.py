"""Models of Megatron core with latent attention and with layers for multi-token prediction, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention


def allow_plain_latent_attention() -> None:
    """Let Megatron's plain layers have latent attention: their attention core takes no widths of keys and values.

    Megatron asks by `isinstance` for classes that are None without Transformer Engine.
    """
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    first = DotProductAttention.__init__
    if first.__name__ == "with_widths":
        return

    def with_widths(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        first(self, *args, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = with_widths


def with_predictions(model: Any, tokens: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """The logits of a model with layers for multi-token prediction: theirs, then its own, one behind the other.

    Theirs are left out for the last tokens, which have no next ones. Megatron computes theirs only for labels, and
    returns a loss then.
    """
    computed: list[torch.Tensor] = []
    hook = model.output_layer.register_forward_hook(lambda *call: computed.append(call[2][0].transpose(0, 1)))
    model.compute_language_model_loss = lambda labels, logits: torch.zeros(labels.shape)
    model(tokens, *inputs, labels=tokens)
    hook.remove()
    assert len(computed) == 1 + model.config.mtp_num_layers
    ahead, own = computed[:-1], computed[-1]
    return torch.cat([*(logits[:, : -i - 1] for i, logits in enumerate(ahead)), own], 1)
