"""Notices: what a user should know about a checkpoint, and what is no error."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from ckpt_formats.core.arguments import Checked
from ckpt_formats.core.text import list_names, printable

MAX_NAMES = 5
"""Names that a notice shows, unless the user wants all."""


class Weight(IntEnum):
    """The importance of a notice. The most important ones are printed first."""

    LOST = 3
    """Something of the source is not in the result, or has lost its meaning there."""
    UNSURE = 2
    """The reader made an assumption that the files do not fully prove."""
    INFO = 1
    """Further information."""


@dataclass(frozen=True)
class Notice(Checked):
    """One sentence, without a full stop, and the names (of tensors, files, keys) that it ends with.

    >>> print(Notice("not read", ("a.bin", "b.bin")))
    not read: a.bin, b.bin
    """

    text: str
    names: tuple[str, ...] = ()
    weight: Weight = Weight.INFO

    def __str__(self) -> str:
        return self.shown(MAX_NAMES)

    def __contains__(self, part: str) -> bool:
        """Whether this text is in the sentence, or in one of its names."""
        return part in self.shown(len(self.names))

    def shown(self, max_names: int = MAX_NAMES) -> str:
        """The sentence with at most `max_names` names, and the number of further ones."""
        if not self.names:
            return self.text
        hint = " (`--verbose`)" if len(self.names) > max_names else ""
        return f"{self.text}: {list_names(self.names, printable, max_names)}{hint}"


def unsure(texts: Iterable[str]) -> tuple[Notice, ...]:
    """Notices of assumptions that the files do not fully prove."""
    return tuple(Notice(text, weight=Weight.UNSURE) for text in texts)


def by_weight(notices: Iterable[Notice]) -> list[Notice]:
    """Each notice once, the most important first, else in their order."""
    return sorted(dict.fromkeys(notices), key=lambda notice: -notice.weight)
