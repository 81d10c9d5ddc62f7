"""Collect notes for the user, and print each once, the most important first.

They are printed before anything else is printed or takes long. With `--json` they are only in the object that is
printed.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import click

from ckpt_formats.core.notices import Notice, Weight, by_weight
from ckpt_formats.core.text import folded, printable


@dataclass
class Notes:
    """The notes of one command."""

    as_json: bool = False
    verbose: bool = False
    """Show all names of each note."""
    quiet: bool = False
    """Print no notes."""
    taken: dict[Notice, None] = field(default_factory=dict)
    """All notes, in the order in which they came."""
    shown: set[Notice] = field(default_factory=set)


_notes = Notes()


def begin(as_json: bool, verbose: bool, quiet: bool = False) -> None:
    """Forget the notes of an earlier command in this process."""
    global _notes
    _notes = Notes(as_json, verbose, quiet)


def note(*notices: Notice | str, weight: Weight = Weight.INFO) -> None:
    """Add notes for the user; a text becomes a note of this weight."""
    for notice in notices:
        _notes.taken.setdefault(notice if isinstance(notice, Notice) else Notice(notice, weight=weight))


def withdraw(begin: str) -> None:
    """Forget the notes that begin with this text and are not printed yet: what the command does makes them untrue."""
    for notice in [one for one in _notes.taken if one.text.startswith(begin) and one not in _notes.shown]:
        del _notes.taken[notice]


def is_verbose() -> bool:
    """Does the user want to see all names?"""
    return _notes.verbose


def flush() -> None:
    """Print the notes that are not printed yet, on stderr; none with `--json` or `--quiet`."""
    if _notes.as_json or _notes.quiet:
        return
    for notice in by_weight(notice for notice in _notes.taken if notice not in _notes.shown):
        _notes.shown.add(notice)
        text = notice.shown(len(notice.names)) if _notes.verbose else notice.shown()
        tell(f"note: {printable(text)}")


def tell(line: str) -> None:
    """Print a line on stderr. A terminal gets it broken at spaces, as wide as it is; a file gets it whole."""
    if sys.stderr is None or not sys.stderr.isatty():
        click.echo(line, err=True)
        return
    import shutil  # only terminals have a width

    for part in folded(line, shutil.get_terminal_size((100, 24)).columns):
        click.echo(part, err=True)


def to_json() -> list[dict[str, Any]]:
    """All notes of the command so far, for programs."""
    return [
        {"text": notice.text, "names": list(notice.names), "weight": notice.weight.name.lower()}
        for notice in by_weight(_notes.taken)
    ]
