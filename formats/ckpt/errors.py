"""All errors of the library. They are also at the top, as `ckpt.CkptError` and the others."""

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
