"""Receipts of finished files as objects in a store: each object is written once, with many receipts."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from ckpt.pipeline import receipts
from ckpt_formats.core.format import Receipt
from ckpt_formats.stores.bucket import Bucket

_BATCH = 64
"""Receipts of one object."""
_BATCH_SECONDS = 5.0
"""A receipt is put at the latest with the first one that comes so long after it."""
_REQUESTS = 16
"""Objects that are read at once."""


class ObjectJournal:
    """The receipts in one folder of a store."""

    def __init__(self, bucket: Bucket, folder: str) -> None:
        self._bucket = bucket
        self._folder = folder
        self._waiting: list[Receipt] = []
        self._put = time.monotonic()

    def read(self, keys: Iterable[str]) -> Iterator[Receipt]:
        """The receipts in those objects of the store, of whose `keys` some may lie elsewhere."""
        journal = sorted(key for key in keys if key.startswith(f"{self._folder}/"))
        with ThreadPoolExecutor(_REQUESTS, "ckpt-requests") as pool:
            contents = list(pool.map(self._bucket.read, journal))
        for content in contents:
            lines = "" if content is None else content[0].decode("utf-8", "replace")
            yield from receipts.from_lines(lines.splitlines())

    def add(self, receipt: Receipt) -> bool:
        """Take a receipt. Whether it is time to `flush`."""
        self._waiting.append(receipt)
        return len(self._waiting) >= _BATCH or time.monotonic() - self._put > _BATCH_SECONDS

    @property
    def waiting(self) -> int:
        """How many receipts are in no object yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Put the receipts that wait."""
        if self._waiting:
            lines = "".join(map(receipts.to_line, self._waiting))
            self._bucket.create(f"{self._folder}/{uuid4().hex}", lines.encode())
            self._waiting.clear()
        self._put = time.monotonic()

    def forget(self) -> None:
        """Drop the receipts that wait: their files were removed."""
        self._waiting.clear()
