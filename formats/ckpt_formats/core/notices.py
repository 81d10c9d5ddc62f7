"""What a user should know of a checkpoint which is no error."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from ckpt_formats.core.text import printable

MOST_NAMES = 5
"""Names that a notice shows, unless the user wants all."""


class Weight(IntEnum):
    """How much a notice matters; the heaviest are printed first."""

    LOST = 3
    """Something of the source is not in the result, or is there without its meaning."""
    UNSURE = 2
    """Something was decided that the files do not fully prove."""
    INFO = 1
    """Something that is good to know."""


@dataclass(frozen=True)
class Notice:
    """One sentence, without a full stop, and the names (of tensors, files, keys) that it ends with.

    >>> print(Notice("not read", ("a.bin", "b.bin")))
    not read: a.bin, b.bin
    """

    text: str
    names: tuple[str, ...] = ()
    weight: Weight = Weight.INFO

    def __str__(self) -> str:
        return self.shown(MOST_NAMES)

    def __contains__(self, part: str) -> bool:
        """Is this text in the sentence, or in any of its names?"""
        return part in self.shown(len(self.names))

    def shown(self, most: int = MOST_NAMES) -> str:
        """The sentence with at most so many names; more are counted."""
        more = f" and {len(self.names) - most:,} more (`--verbose`)" if len(self.names) > most else ""
        return f"{self.text}: {', '.join(map(printable, self.names[:most]))}{more}" if self.names else self.text


def unsure(texts: Iterable[str]) -> tuple[Notice, ...]:
    """Sentences about something that the files do not fully prove."""
    return tuple(Notice(text, weight=Weight.UNSURE) for text in texts)


def by_weight(notices: Iterable[Notice]) -> list[Notice]:
    """Each once, the heaviest first, else in their order."""
    return sorted(dict.fromkeys(notices), key=lambda notice: -notice.weight)
