"""Follow a chain into a folder until it has to stop, and tell others of each step."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt.following.notices import notify_url, post_step, run_command
from ckpt.following.served import Advance, ServedFolder
from ckpt.following.shards import TensorParallelRank
from ckpt.following.source import FollowedStep, FollowingStopped, PublishedSource
from ckpt.pipeline import Resources
from ckpt_formats.core.arguments import Count, LocalPath, Positive, StrPath, checked
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError, OutputError
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.rules import rules_of
from ckpt_formats.universal.published.records import Head, RecordRef

_LOOK_SECONDS = 1.0
"""How long one look at the head waits for another one, where the place can wait."""
_LONGEST_PAUSE = 30.0
"""Seconds until a chain that cannot be read is read again: twice as long each time."""


@dataclass(frozen=True)
class FollowEvent:
    """Something that happened.

    Attributes:
        kind: `verified`: what the folder served at the start is whole; `discarded`: it was not, and is served no
            longer; `serving`: another step is served; `notified`: the URL has answered, or not (`error`); `executed`:
            the command has ended; `waiting`: there is no newer step now; `failed`: the chain cannot be read now.
        step: The step that is served then.
        path: Where it is served.
        advance: What was read for it.
        seconds: From the head that named it to the link.
        error: Why it failed or was discarded.
        exit_code: Of the command.
    """

    kind: Literal["verified", "discarded", "serving", "notified", "executed", "waiting", "failed"]
    step: FollowedStep | None
    path: Path | None
    advance: Advance | None = None
    seconds: float | None = None
    error: CkptError | None = None
    exit_code: int | None = None


@checked
def follow_into(
    chain: StrPath,
    target: Path,
    report: Callable[[FollowEvent], None],
    *,
    stop: threading.Event | None = None,
    once: bool = False,
    step: Count | None = None,
    every: float = 0.2,
    notify: str | None = None,
    command: str | None = None,
    key: bytes | None = None,
    tp: Positive = 1,
    rank: Count = 0,
    rules: LocalPath | Sequence[Rule] = (),
    resources: Resources | None = None,
    patience: float = 5.0,
) -> None:
    """Serve the last step of a published chain in a folder, until `stop` is set.

    Args:
        chain: A path or URL.
        target: The folder; see `ckpt.following.served`.
        report: Gets what happens.
        stop: Ends the work once it is set.
        once: Go to the last step, and return.
        step: Go to this step of the newest epoch, and return; if it is not published yet, wait for it unless `once`.
        every: Seconds between two looks at the head, where the place cannot wait.
        notify: A URL to which each step is posted.
        command: A command of the shell that is run for each step.
        key: The key with which the run signs its records.
        tp: Of how many tensor-parallel ranks one is served. Above 1, the folder has the shards of that rank.
        rank: Which of them: 0 to tp - 1.
        rules: How tensors are sharded; see `Follower`.
        resources: Threads that decode, and the folder for objects larger than 64 MiB on their way.
        patience: Seconds for which a missing object is read again before another route is tried.

    While the chain cannot be read, or objects are missing, it is read again, unless `once`. Raises:
        NotFoundError: With `once`: nothing is published; with `step`: the chain does not have it any more.
        CorruptError: Something is damaged, also when it is read again.
        UnsupportedError: The run publishes another model than the one that is served.
        RulesError: With `tp`: no rule states how a tensor is sharded, or it does not divide.
        LockedError: Another process serves the folder.
        NoSpaceError: The disk is full.
        OutputError: The folder cannot be written, or has other contents.
    """
    part = TensorParallelRank(tp, rank, rules_of(rules))
    if notify is not None:
        notify_url(notify)
    own, stop = resources or Resources.of_machine(), stop or threading.Event()
    scratch = None if own.scratch is None else Path(own.scratch)
    source = PublishedSource(chain, key, patience, stop, scratch)
    if once and source.head() is None:
        raise NotFoundError(
            "nothing is published here yet", where=source.where, hint="Check the path, or wait without --once."
        )
    with ServedFolder(target, source, own.workers, part) as served:
        follower = _FolderFollower(served, report, stop, once, step, every, notify, command)
        try:
            follower.run()
        except FollowingStopped:
            return


@dataclass
class _FolderFollower:
    served: ServedFolder
    report: Callable[[FollowEvent], None]
    stop: threading.Event
    once: bool
    wanted: int | None
    every: float
    notify: str | None
    command: str | None
    is_verified: bool = False
    pause: float = 0.0
    waits: bool = False

    def run(self) -> None:
        while not self.stop.is_set():
            begin = time.monotonic()
            try:
                if self._go_on():
                    return
                self.pause = 0.0
            except OutputError:
                raise
            except (IncompleteError, OSError) as error:
                failure = error if isinstance(error, CkptError) else _unreadable(error, self.served)
                if self.once:
                    raise failure from error
                self._event("failed", error=failure)
                self.pause = min(max(2 * self.pause, self.every, 0.1), _LONGEST_PAUSE)
            self.stop.wait(max(self.pause, self.every - (time.monotonic() - begin)))

    def _go_on(self) -> bool:
        """Serve the next step if there is one. Returns whether all is done."""
        served = self.served
        if not self.is_verified:
            error = served.verify()
            self.is_verified = True
            if error is not None or served.step is not None:
                self._event("verified" if error is None else "discarded", error=error)
        head = served.source.head(0.0 if self.once or served.source.newest is None else _LOOK_SECONDS)
        target = None if head is None else self._target(head)
        if head is None or target is None:
            if not self.waits:
                self._event("waiting")
                self.waits = True
            return self.once
        if served.step is None or served.step.ref != target:
            self._serve(head, target)
            self.waits = False
        return self.once or self.wanted is not None

    def _target(self, head: Head) -> RecordRef | None:
        """The step to serve; None if there is no newer one."""
        if self.wanted is not None:
            if head.record.name.step < self.wanted and not self.once:
                return None
            return self.served.source.ref(head, self.wanted)
        current = self.served.step
        if current is None or head.record.name > current.ref.name:
            return head.record
        if head.record.name == current.ref.name and head.record != current.ref:
            where = self.served.source.where / current.ref.name.key
            raise CorruptError("the record is not that of the served step", where=where)
        return current.ref if self.once else None

    def _serve(self, head: Head, target: RecordRef) -> None:
        begin = time.monotonic()
        advance = self.served.advance(head, target)
        self._event("serving", advance=advance, seconds=time.monotonic() - begin)
        if self.notify is not None:
            error = post_step(self.notify, advance.step, advance.path, self.stop)
            if error is None:
                self.served.release_other()
            self._event("notified", error=error)
        if self.command is not None and not self.stop.is_set():
            code = run_command(self.command, advance.step, advance.path, self.stop)
            self._event("executed", exit_code=code)

    def _event(
        self,
        kind: Literal["verified", "discarded", "serving", "notified", "executed", "waiting", "failed"],
        advance: Advance | None = None,
        seconds: float | None = None,
        error: CkptError | None = None,
        exit_code: int | None = None,
    ) -> None:
        served = self.served
        path = None if served.step is None else served.path
        self.report(FollowEvent(kind, served.step, path, advance, seconds, error, exit_code))


def _unreadable(error: OSError, served: ServedFolder) -> CkptError:
    where = error.filename or served.source.where
    return NotFoundError(f"cannot be read: {error.strerror or error}", where=where)
