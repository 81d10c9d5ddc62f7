"""How a checkpoint's tensors are sharded over ranks."""

from collections.abc import Sequence

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.layout import Layout, Rule


def effective_layout(checkpoint: Checkpoint, own: Sequence[Rule] = ()) -> Layout:
    """The rules by which the format read the tensors, or by which its engine shards them. `own` rules come first."""
    if checkpoint.layout.rules:
        return checkpoint.layout
    if checkpoint.origin.engine == "megatron":
        from ckpt_formats.engines.megatron.shared.rules import layout_of

        return layout_of(checkpoint, tuple(own))
    return Layout(tuple(own))
