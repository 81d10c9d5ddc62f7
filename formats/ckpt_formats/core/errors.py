"""The errors of this program: one class for each kind that a user can act upon.

    CkptError
    ├── InvalidArgumentError  an argument has a value that it cannot have; a `ValueError`
    ├── NotFoundError      nothing is here, or nothing that a format recognises; a `FileNotFoundError`
    ├── NoMatchError       a name, pattern or state that nothing has; a `LookupError`
    ├── UnsupportedError   recognised, but this version cannot do it
    ├── UnsafeError        refused: it would run code, leave a folder or exhaust the machine
    ├── CorruptError       the bytes contradict each other
    ├── IncompleteError    something is missing
    ├── RulesError         the rules do not fit the tensors
    └── OutputError        the target cannot be written
        ├── LockedError    another process is writing it
        └── NoSpaceError   the disk is full

Which one it is follows from what has to change for the same call to succeed:

- an argument: a value, a combination of options, a number that does not fit this checkpoint (`InvalidArgumentError`);
  a name or pattern that nothing has (`NoMatchError`); a path at which there is nothing (`NotFoundError`)
- the format, the file or the machine: a format that has no place for something, a file of another kind or version, a
  package that is not installed (`UnsupportedError`)
- the bytes: they contradict each other (`CorruptError`), or some are absent (`IncompleteError`)

Only `ckpt_cli.main` makes messages and exit codes of them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class CkptError(Exception):
    """An error: what happened (`what`), in which file or tensor (`where`), and what the user can do (`hint`)."""

    def __init__(self, what: str, *, where: str | Path | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        return self.what if self.where is None else f"{self.where}: {self.what}"


class InvalidArgumentError(CkptError, ValueError):
    """An argument, or an option of a format, has a value that it cannot have.

    It goes with no checkpoint, or not with the given one: the call needs another value, not another file.
    """


class NoMatchError(CkptError, LookupError):
    """Nothing has this name or state, or matches this pattern."""


class NotFoundError(CkptError, FileNotFoundError):
    """There is nothing at this path, or nothing that any format recognises.

    As an `OSError`, it has `errno`, `strerror` and `filename`. Code that turns errors of the system into others
    therefore catches `CkptError` first.
    """

    def __init__(self, what: str, *, where: str | Path | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.errno, self.strerror, self.filename = errno.ENOENT, what, self.where


class UnsupportedError(CkptError):
    """Recognised, but outside what this version, the format or this machine can do, whatever the arguments."""


class UnsafeError(CkptError):
    """Refused, because it would be dangerous to do what the file asks for."""


class CorruptError(CkptError):
    """The bytes contradict each other or their checksum."""


class IncompleteError(CkptError):
    """A file, rank or block that the checkpoint needs is absent."""


class RulesError(CkptError):
    """The rules do not state how a tensor is sharded, or contradict its shapes."""


class OutputError(CkptError):
    """The target cannot be written."""


class LockedError(OutputError):
    """Another process is writing the same target."""


class NoSpaceError(OutputError):
    """The disk that holds the target is full."""


MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, AssertionError)
"""What Python raises for values of another form than the code expects."""


@contextmanager
def at_tensor(name: str) -> Iterator[None]:
    """Within, an error that names no place gets the tensor for its place. `name` must be printable."""
    try:
        yield
    except CkptError as error:
        if error.where is None:
            error.where = f"tensor {name}"
        raise


@contextmanager
def form_of(what: str, where: Path) -> Iterator[None]:
    """Within, Python's errors for a tree of an unexpected form become `CorruptError`. `what`: the kind of
    checkpoint."""
    try:
        yield
    except CkptError:
        raise
    except MALFORMED as error:
        raise CorruptError(
            f"the files lack the form of {what}: {flaw(error)}",
            where=where,
            hint="Run again with -v to see where reading stopped.",
        ) from error


def flaw(error: Exception) -> str:
    """Python's error for a tree of an unexpected form, in plain words.

    >>> flaw(KeyError("params"))
    'the entry `params` is missing'
    """
    if isinstance(error, KeyError) and error.args:
        key = error.args[0]
        return f"the entry `{key[:60]}` is missing" if isinstance(key, str) else "an entry is missing"
    if isinstance(error, IndexError):
        return "a list is shorter than it should be"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, (TypeError, AttributeError)):
        return "a value has the wrong type"
    return f"a value is not as it should be ({str(error)[:100]})"
