"""Receipts of finished files in a place.

In a folder, each process appends to a file of its own. In a store, each object is written once, with many receipts.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from ckpt.pipeline import receipts
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.place import Place

BATCH = 64
"""Receipts of one object."""
_REQUESTS = 16
"""Objects that are read at once."""


class Journal:
    """The receipts in one place, of all processes that write a target."""

    def __init__(self, place: Place) -> None:
        self._place, self._name = place, _new_name()
        self._waiting: list[Receipt] = []
        self._may_be_cut = False
        self._written = time.monotonic()

    def read(self, names: Iterable[str] | None = None) -> Iterator[Receipt]:
        """All receipts that are whole. `names`: those of the place, if it was just listed."""
        names = sorted(self._place.list() if names is None else names)
        with ThreadPoolExecutor(_REQUESTS, "ckpt-requests") as pool:
            contents = list(pool.map(self._place.read, names))
        for content in contents:
            lines = "" if content is None else content[0].decode("utf-8", "replace")
            yield from receipts.from_lines(lines.splitlines())

    def add(self, receipt: Receipt) -> bool:
        """Take a receipt. Returns whether it is time to `flush`."""
        self._waiting.append(receipt)
        return len(self._waiting) >= BATCH or time.monotonic() - self._written > self._place.batch_seconds

    @property
    def waiting(self) -> int:
        """How many receipts are in no object yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Write the receipts that wait."""
        if self._waiting:
            lines = "".join(map(receipts.to_line, self._waiting))
            if self._place.can_append:
                start = "\n" if self._may_be_cut else ""
                self._may_be_cut = True  # a full disk may cut a line short
                self._place.append(self._name, f"{start}{lines}".encode())
                self._may_be_cut = False
            else:
                self._place.create(_new_name(), lines.encode())
            self._waiting.clear()
        self._written = time.monotonic()

    def forget(self) -> None:
        """Drop the receipts that wait: their files were removed."""
        self._waiting.clear()


def _new_name() -> str:
    return f"receipts-{uuid4().hex}"
