"""The options of the format."""

from dataclasses import dataclass

from ckpt_formats.core.arguments import Count, Positive, Ranks, ZeroStage
from ckpt_formats.core.layout import Rule


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How a checkpoint is laid out over ranks. None: as in the source."""

    dp: Ranks | None = None
    """The number of data-parallel ranks."""
    tp: Ranks | None = None
    """The number of tensor-parallel ranks; rules must state how tensors are sharded over them."""
    pp: Ranks | None = None
    """The number of pipeline stages."""
    stages: tuple[Count, ...] | None = None
    """The first layer of each pipeline stage."""
    zero: ZeroStage | None = None
    """The ZeRO stage, 0 to 3."""
    vocab_rows: Positive | None = None
    """Rows of the vocabulary's tables with their padding."""
    rules: tuple[Rule, ...] = ()
    """The user's rules, which come before those of the source."""
