"""The options of the format."""

from dataclasses import dataclass
from typing import Annotated

from ckpt_formats.core.arguments import Positive, Range, Ranks
from ckpt_formats.core.layout import Rule


@dataclass(frozen=True, kw_only=True)
class UniversalOptions:
    """The ranks for which the files of the model are written. None: as in the source."""

    dp: Ranks | None = None
    """The number of data-parallel ranks. It is only stated: nothing is sharded over them."""
    tp: Ranks | None = None
    """The number of tensor-parallel ranks."""
    zero: Annotated[int, Range(1, 3)] | None = None
    """The ZeRO stage that will load it, 1 to 3."""
    vocab_rows: Positive | None = None
    """Rows of the vocabulary's tables with their padding."""
    rules: tuple[Rule, ...] = ()
    """The user's rules, which come before those of the source."""
