"""Python's garbage collector, paused."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 10_000
"""Objects that are searched for garbage within a millisecond."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within, Python collects no garbage.

    A reader makes millions of objects that all stay: to search them for garbage takes a third of its time. At the
    end, many of them count as old, so that they are not searched at once; but not if the program has frozen objects of
    its own, because then only the program may thaw them. Python counts these one by one, which takes a tenth of a
    second in a large program, so few objects are left to the collector.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
