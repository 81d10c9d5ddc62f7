"""What can go wrong with a checkpoint, in the few kinds that a user can act upon.

    CkptError
    ├── NotFound       there is nothing here, or nothing we know
    ├── Unsupported    known, but not something this version can do
    ├── Unsafe         refused: it would run code, escape a folder or exhaust the machine
    ├── Corrupt        the bytes contradict themselves
    ├── Incomplete     something that should be there is not
    ├── BadRules       the rules do not fit the tensors
    └── OutputError    the target cannot be written
        ├── Locked     another process is writing it
        └── NoSpace    the disk is full

Only `ckpt_cli.main` turns them into messages and exit codes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CkptError(Exception):
    """What happened, where, and what to do about it."""

    def __init__(self, what: str, *, where: str | Path | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        return self.what if self.where is None else f"{self.where}: {self.what}"


class NotFound(CkptError):
    """There is nothing at this path, or nothing that any format recognises."""


class Unsupported(CkptError):
    """Recognised, but outside what this version does."""


class Unsafe(CkptError):
    """Refused, because obeying the file would be dangerous."""


class Corrupt(CkptError):
    """The bytes contradict themselves or their checksum."""


class Incomplete(CkptError):
    """A file, rank or block that the checkpoint needs is absent."""


class BadRules(CkptError):
    """The rules do not say how a tensor is cut, or say something its shapes contradict."""


class OutputError(CkptError):
    """The target cannot be written."""


class Locked(OutputError):
    """Another process is writing the same target."""


class NoSpace(OutputError):
    """The disk that holds the target is full."""


@contextmanager
def form_of(what: str, where: Path) -> Iterator[None]:
    """The last net below a reader of foreign trees: what they lack or hold otherwise becomes `Corrupt`."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(
            f"the files lack the form of {what}: {flaw(error)}",
            where=where,
            hint="Run again with -v to see where reading stopped.",
        ) from error


def flaw(error: Exception) -> str:
    """What Python says of a tree that has not the form that its reader expects, in plain words.

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
        return "a value is of another kind than it should be"
    return f"a value is not as it should be ({str(error)[:100]})"
