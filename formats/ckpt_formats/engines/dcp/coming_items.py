"""The ends of items in a store, requested before the items are opened.

To know where the values of an item lie, both ends of the item are read. A plan opens all items of a file, one after
another. So the ends of those that come next are requested at once: as many as were opened in a row, and none for one
tensor alone.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock

from ckpt_formats.core.store_path import request
from ckpt_formats.engines.dcp.metadata import ItemRange

_MAX_COMING = 16
"""Items of a file whose ends are requested at once."""


class ComingItems:
    """The items of a folder in a store, by their order in each file. Threads may share it."""

    def __init__(self, folder: Path, items: Sequence[Collection[ItemRange]], edge: int) -> None:
        """`items`: those that each metadata file names. `edge`: the bytes of an item's end that are read."""
        self._folder, self._items, self._edge = folder, items, edge
        self._extents: dict[str, list[tuple[int, int]]] | None = None
        self._places: dict[str, tuple[int, int]] = {}
        """By file: the number of the item that was opened last, and how many were opened in a row before it."""
        self._lock = Lock()

    def opened(self, item: ItemRange) -> None:
        """Request the ends of the items that will be opened next, if this one goes on a row."""
        with self._lock:
            extents = self._of(item.file)
            number = bisect_left(extents, (item.offset, 0))
            last, row = self._places.get(item.file, (-1, -1))
            if number == last:
                return
            row = row + 1 if number == last + 1 else 0
            self._places[item.file] = number, row
        path = self._folder / item.file
        for offset, nbytes in extents[number + 1 : number + 1 + min(row, _MAX_COMING)]:
            request(path, offset, self._edge)
            request(path, max(offset, offset + nbytes - self._edge), self._edge)

    def _of(self, file: str) -> list[tuple[int, int]]:
        """The offsets and lengths of the items of a file, in order."""
        if self._extents is None:
            self._extents = {}
            for item in (item for items in self._items for item in items):
                self._extents.setdefault(item.file, []).append((item.offset, item.nbytes))
            for extents in self._extents.values():
                extents.sort()
        return self._extents.get(file, [])
