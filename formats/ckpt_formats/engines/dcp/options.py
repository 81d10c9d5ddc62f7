"""The options of the format."""

from dataclasses import dataclass

from ckpt_formats.core.arguments import Ranks
from ckpt_formats.core.layout import Rule
from ckpt_formats.state_dicts.keys import StateKeys, Style


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The ranks over which a checkpoint is laid out, and the keys of its state dicts. None: as in the source."""

    dp: Ranks | None = None
    """The number of data-parallel ranks, over which the first axis of tensors is sharded."""
    tp: Ranks | None = None
    """The number of tensor-parallel ranks; rules must state how tensors are sharded over them."""
    keys: Style | StateKeys | None = None
    """The keys of the state dicts; None: as in the source, else nested."""
    rules: tuple[Rule, ...] = ()
    """The user's rules, which come before those of the source."""
