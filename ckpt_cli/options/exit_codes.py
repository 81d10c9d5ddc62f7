"""The one table from errors to exit codes, and to the names of their kinds in JSON."""

from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    LockedError,
    NoMatchError,
    NoSpaceError,
    NotFoundError,
    OutputError,
    RulesError,
    UnsafeError,
    UnsupportedError,
)

USAGE, DAMAGED = 2, 20

EXIT_CODES: dict[type[CkptError], int] = {
    InvalidArgumentError: USAGE,
    NotFoundError: 10,
    NoMatchError: 10,
    LockedError: 11,
    CorruptError: DAMAGED,
    IncompleteError: DAMAGED,
    UnsafeError: 21,
    UnsupportedError: 22,
    RulesError: 23,
    NoSpaceError: 28,
    OutputError: 30,
}
"""The first match counts, so a kind comes before its base class."""

KINDS: dict[type[CkptError], str] = {
    InvalidArgumentError: "usage",
    NotFoundError: "not found",
    NoMatchError: "not found",
    LockedError: "locked",
    CorruptError: "damaged",
    IncompleteError: "incomplete",
    UnsafeError: "unsafe",
    UnsupportedError: "unsupported",
    RulesError: "rules",
    NoSpaceError: "no space",
    OutputError: "target",
}
"""The names of the kinds in JSON."""


def exit_code(error: CkptError) -> int:
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))


def kind_of(error: CkptError) -> str:
    """The name of the kind of an error in JSON."""
    return next(name for kind, name in KINDS.items() if isinstance(error, kind))
