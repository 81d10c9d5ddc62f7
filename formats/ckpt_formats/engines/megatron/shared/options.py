"""The options of both formats."""

from dataclasses import dataclass

from ckpt_formats.core.arguments import Count, Positive, Ranks, ZeroStage
from ckpt_formats.core.layout import Rule


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How a checkpoint is laid out over ranks. None: as in the source."""

    dp: Ranks | None = None
    """The number of data-parallel ranks."""
    tp: Ranks | None = None
    """The number of tensor-parallel ranks."""
    pp: Ranks | None = None
    """The number of pipeline stages."""
    vpp: Ranks | None = None
    """The number of model chunks of each pipeline stage."""
    stages: tuple[Count, ...] | None = None
    """The first layer of each pipeline stage, or of each model chunk."""
    ep: Ranks | None = None
    """The number of expert-parallel ranks."""
    etp: Ranks | None = None
    """The number of tensor-parallel ranks of each expert."""
    zero: ZeroStage | None = None
    """1: Megatron's distributed optimizer; 0: the plain one."""
    vocab_rows: Positive | None = None
    """Rows of the vocabulary's tables with their padding."""
    rules: tuple[Rule, ...] = ()
    """The user's rules, which come before those of the source."""

    @property
    def stage_count(self) -> int | None:
        """The number of pipeline stages, also if only their first layers are given."""
        return len(self.stages) // (self.vpp or 1) if self.stages and self.pp is None else self.pp
