"""The options of the format."""

from dataclasses import dataclass

from ckpt_formats.core.layout import Rule


@dataclass(frozen=True, kw_only=True)
class UniversalOptions:
    """The ranks for which the files of the model are written. None: as in the source."""

    dp: int | None = None
    """The number of data-parallel ranks. It is only stated: nothing is sharded over them."""
    tp: int | None = None
    """The number of tensor-parallel ranks."""
    zero: int | None = None
    """The ZeRO stage that will load it, 1 to 3."""
    vocab_rows: int | None = None
    """Rows of the vocabulary's tables with their padding."""
    rules: tuple[Rule, ...] = ()
    """The user's rules, which come before those of the source."""
