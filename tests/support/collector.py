"""Spare the garbage collector of a process that runs tests what pytest has collected.

A full search for garbage visits every object that is not frozen: modules and tests alone take it 0.5 to 2.7 seconds.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze


def freeze_for_good() -> None:
    """Freeze all objects that there are now. Later calls of `gc.freeze` and `gc.unfreeze` do nothing.

    Tests run commands within this process. A command freezes everything, which is right in a process of its own; here
    it would freeze garbage of earlier tests, too, which no search would find then. And `gc.unfreeze`, by which the
    tests' `ckpt` ends, would thaw modules and tests.
    """
    _FREEZE()
    gc.freeze = gc.unfreeze = _do_nothing


@contextmanager
def thawed() -> Iterator[None]:
    """Within, nothing is frozen at first, and `gc.freeze` and `gc.unfreeze` are Python's own: for tests of freezing."""
    gc.freeze, gc.unfreeze = _FREEZE, _UNFREEZE
    gc.unfreeze()
    try:
        yield
    finally:
        freeze_for_good()


def _do_nothing() -> None:
    """Stand in for `gc.freeze` and `gc.unfreeze`."""
