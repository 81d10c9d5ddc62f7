"""All errors of the library. `CkptError` and the most common ones are also at the top."""

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

__all__ = [
    "CkptError",
    "CorruptError",
    "IncompleteError",
    "InvalidArgumentError",
    "LockedError",
    "NoMatchError",
    "NoSpaceError",
    "NotFoundError",
    "OutputError",
    "RulesError",
    "UnsafeError",
    "UnsupportedError",
]
