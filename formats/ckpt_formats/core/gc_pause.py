"""Python's garbage collector, paused."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within, Python collects no garbage.

    A reader makes millions of objects that all stay: to search them for garbage takes a third of its time. At the
    end, they count as old, so that they are not searched at once; but not if the program has frozen objects of its
    own, because then only the program may thaw them.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
