"""What follows saves in tests."""

import os
from pathlib import Path


def note(path: str, *, suffix: str) -> None:
    """Leave a file beside a save with its number of files; fail after steps 2 and 12, and end after step 3."""
    step = int(path[-1])
    if step == 2:
        raise ValueError("no step 2")
    if step == 3:
        os._exit(7)
    Path(path + suffix).write_text(str(len(list(Path(path).iterdir()))))
