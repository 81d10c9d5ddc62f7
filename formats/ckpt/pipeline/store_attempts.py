"""Files that several machines write into a store: each in a scratch folder of its own, then created at its final key.

A file may be written twice. Who comes second finds the object there: if it has the same bytes, all is well; otherwise
a process of another job has put it, and that is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ckpt.pipeline.lease import has_lease
from ckpt.pipeline.scratch import scratch_folder
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.format import Receipt
from ckpt_formats.stores.bucket import Bucket

_UPLOADS = 4
"""Files that one process uploads at once, each of which takes 16 MiB of memory."""


@dataclass(frozen=True)
class SharedPrefix:
    """A target in a store, as a process elsewhere writes it. Plain data, to be sent; no credentials are in it."""

    bucket: Bucket
    prefix: str
    lease: str
    """The key of the lease of the run, which its coordinator renews."""
    owner: str | None
    """The owner of the lease. None: no run has one, as with shards."""
    scratch: Path | None
    """Where scratch folders are made; None: where the system has temporary files."""
    check_every: ClassVar[float] = 20.0

    @contextmanager
    def attempt(self) -> Iterator["StoreAttempt"]:
        """A sink for some files. Raises `OutputError` if the run has ended."""
        self.check()
        with scratch_folder(self.scratch) as data:
            yield StoreAttempt(data, self)

    def is_open(self) -> bool:
        """Whether the run goes on."""
        return self.owner is None or has_lease(self.bucket, self.lease, self.owner)

    def check(self) -> None:
        """Raise `OutputError` if the run has ended."""
        if not self.is_open():
            raise OutputError(
                "the run has ended, and nobody waits for this file", where=f"{self.bucket.url}/{self.lease}"
            )


@dataclass(frozen=True)
class StoreAttempt:
    """The sink of one attempt to write some files."""

    data: Path
    target: SharedPrefix

    @property
    def parallel(self) -> int:
        return _UPLOADS

    def persist(self, receipt: Receipt) -> Receipt:
        """Upload the file, and remove it from the scratch folder. Raises `OutputError` if another job has put it."""
        file, target = self.data / receipt.file, self.target
        key = f"{target.prefix}/{receipt.file}"
        target.check()

        def check() -> None:
            """Before an upload in parts is completed, which no store makes conditional."""
            target.check()
            if target.bucket.head(key) is not None:
                raise FileExistsError

        e_tag: str | None
        try:
            e_tag = target.bucket.upload(key, file, check)
        except FileExistsError:
            e_tag = target.bucket.tag_if_equal(key, file)
        if e_tag is None:
            raise OutputError(
                "a process of another job has created this object",
                where=f"{target.bucket.url}/{key}",
                hint="Run the same command again when nobody else writes at this place.",
            )
        file.unlink()
        return replace(receipt, e_tag=e_tag)
