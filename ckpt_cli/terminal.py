"""How wide the terminal is."""

import os
import sys


def width() -> int:
    """The columns of the terminal, or those that `COLUMNS` says; 100 if there is no terminal.

    `shutil` has such a function, but imports all compressors of Python: 3 of the 120 ms that `inspect` takes.
    """
    stated = os.environ.get("COLUMNS", "")
    if stated.isascii() and stated.isdigit() and int(stated[:9]):
        return int(stated[:9])
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 100  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):  # it is closed, or no terminal
        return 100
