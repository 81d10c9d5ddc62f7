"""Tables and long lines for a terminal of any width: nothing is broken inside a number or a name."""

import os
import sys
from collections.abc import Collection, Sequence
from typing import Literal

import click

_GAP = 2
"""Spaces between columns."""


def width() -> int:
    """The columns of the terminal, or those that `COLUMNS` says; 100 if there is no terminal.

    `shutil` has such a function, but imports all compressors of Python, and `inspect` needs none.
    """
    stated = os.environ.get("COLUMNS", "")
    if stated.isascii() and stated.isdigit() and int(stated[:9]):
        return int(stated[:9])
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 100  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):  # it is closed, or no terminal
        return 100


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    breaks: Collection[int] = (),
    indent: int = 0,
) -> str:
    """A table as wide as it must be; the columns `breaks` are broken at spaces if the terminal is narrower.

    `right`: the columns that are aligned to the right, which are those of numbers. All texts must be printable.
    """
    from rich.console import Console  # only tables need it
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    widest = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for i in breaks:
        widest[i] = max(len(word) for row in (head, *rows) for word in row[i].split() or [""])
    needed = sum(widest) + _GAP * (len(head) - 1) + indent
    grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for i, title in enumerate(head):
        justify: Literal["left", "right"] = "right" if i in right else "left"
        grid.add_column(Text(title), justify=justify, no_wrap=i not in breaks, min_width=widest[i], overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(width=max(width(), needed), highlight=False)
    with console.capture() as capture:
        console.print(Padding(grid, (0, 0, 0, indent), expand=False), crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def show(text: str) -> None:
    """Print a table on stdout, with its colours if there are any."""
    click.echo(text, color=True)
