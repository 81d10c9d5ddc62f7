"""The one way by which notes reach the user: each once, the heaviest first.

They are collected until something is about to be printed or to take long. With
`--json` they are in the object that is printed, and nowhere else.
"""

from dataclasses import dataclass, field
from typing import Any

import click

from ckpt_formats.core.notices import Notice, Weight, by_weight
from ckpt_formats.core.text import printable


@dataclass
class Notes:
    """Of one command."""

    as_json: bool = False
    verbose: bool = False
    """Show all names of each."""
    taken: dict[Notice, None] = field(default_factory=dict)
    """All, in the order in which they came."""
    shown: set[Notice] = field(default_factory=set)


_notes = Notes()


def begin(as_json: bool, verbose: bool) -> None:
    """Forget the notes of an earlier command in this process."""
    global _notes
    _notes = Notes(as_json, verbose)


def note(*notices: Notice | str, weight: Weight = Weight.INFO) -> None:
    """Keep notes for the user; a text alone is one of this weight."""
    for notice in notices:
        _notes.taken.setdefault(notice if isinstance(notice, Notice) else Notice(notice, weight=weight))


def is_verbose() -> bool:
    """Does the user want to see all?"""
    return _notes.verbose


def flush() -> None:
    """Print what is not printed yet, on stderr; nothing with `--json`."""
    if _notes.as_json:
        return
    for notice in by_weight(notice for notice in _notes.taken if notice not in _notes.shown):
        _notes.shown.add(notice)
        text = notice.shown(len(notice.names)) if _notes.verbose else notice.shown()
        click.echo(f"note: {printable(text)}", err=True)


def to_json() -> list[dict[str, Any]]:
    """All notes of the command so far, for programs."""
    return [
        {"text": notice.text, "names": list(notice.names), "weight": notice.weight.name.lower()}
        for notice in by_weight(_notes.taken)
    ]
