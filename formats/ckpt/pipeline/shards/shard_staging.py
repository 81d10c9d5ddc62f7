"""Where the shards of a job write, and what they know of each other."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ckpt.pipeline.staging import Sink
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.notices import Notice


class ShardStaging(ABC):
    """What there is of a target that shards write."""

    target: Path
    notes: tuple[Notice, ...] = ()
    """What the user should know of a target that is published."""

    @property
    @abstractmethod
    def disk(self) -> Path:
        """Whose file system must have space for what is written."""

    @property
    @abstractmethod
    def how_to_give_up(self) -> str:
        """How the user removes what the shards have written: part of a sentence."""

    @abstractmethod
    def receipts(self) -> Mapping[str, Receipt]:
        """The receipts of all shards, of files that are there."""

    @abstractmethod
    def attempt(self) -> AbstractContextManager[Sink]:
        """A sink for the files of this process. The last receipts are in the journal when it ends."""

    @abstractmethod
    def note(self, receipt: Receipt) -> None:
        """Add a receipt to the journal of this process."""

    @abstractmethod
    def lease(self, wait: bool, stop: threading.Event) -> AbstractContextManager[str | None]:
        """Within, this process alone publishes; gives None, or who does so instead.

        With `wait`, it is waited until the other one has ended or died.
        """

    @abstractmethod
    def is_published(self) -> bool:
        """Whether shards of this job have published the target."""

    @abstractmethod
    def publish(self, receipts: Sequence[Receipt], commit: Callable[[Path], None]) -> None:
        """Call `commit` with the folder in which it writes what makes a checkpoint of the files; then publish all."""
