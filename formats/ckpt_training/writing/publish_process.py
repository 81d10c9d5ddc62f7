"""The process next to a rank that publishes its weights: it compares, codes and stores them, and rank 0's commits.

`python -m ckpt_training.writing.publish_process RING STATUS TRAINER` starts it, as `save_process`.

**How ranks agree without a collective operation.** A step that may be published is an *occasion*; all ranks count
them alike. Rank 0's process decides which occasion is published next, and states it before that occasion comes, with
how the one before ended. So all ranks publish the same steps, and skip the same ones:

1. At the stated occasion, each rank codes its values against the last published ones, stores the object, and creates
   a receipt with the object's hash and the state against which it is coded.
2. Rank 0's process reads all receipts. If all ranks have stored the step against the same state, it puts the record,
   and then the head. In any case it creates the *outcome*: whether the step is published, and the next occasion.
3. Each process waits for the outcome. If the step is published, its values are now those that the next delta is
   against; else the ones of before stay. A state is never replaced before the commit.

A rank that learns of an occasion too late, because its trainer has gone on, creates a receipt that says so. Then the
step is not published on any rank, and rank 0 announces occasions further ahead, so that a store that is slower than a
training step does not let ranks miss them for ever. A rank that fails, or whose process was started again, says so in
the same way; the next step is then a base, which needs no values of before. A rank that says nothing lets rank 0 wait
for `seconds`, and no longer. Nobody publishes n + 1 while another rank skips it: n + 1 without all receipts is no step.

Receipts and outcomes lie in a folder of this Publisher's own, so those of a killed run are never taken for its own.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.publishing.folds import FoldAnchors
from ckpt.publishing.publication import FoldShares, Publication, open_publication
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt.publishing.retention import remove_unneeded
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.core.errors import CkptError, IncompleteError, InvalidArgumentError, LockedError
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.published.model import PublishedModel
from ckpt_formats.universal.published.records import FOLDER, ObjectRef, RankShare
from ckpt_training.writing.publish_orders import (
    MISSED,
    PUBLISH_ORDERS,
    BeginPublish,
    Mode,
    NoteOccasion,
    PublishSettings,
)
from ckpt_training.writing.ring import Ring
from ckpt_training.writing.save_orders import FinishSave, WriteRuns
from ckpt_training.writing.trainer_messages import OrderWriter, execute_orders, text_of

_ORPHAN_SECONDS = 5.0
"""How long to wait for the other ranks after the trainer has ended."""
_PATIENCE_SECONDS = 8.0
"""How long to wait at the start for the process of a killed trainer, which may still end its last step."""
_NICE = 10
_MAX_REASON = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_REQUESTS = 16
"""Receipts that rank 0 waits for at once: in a store, each takes a round trip."""
_MAX_LEAD = 64
_CALM = 32
"""After so many published steps in a row, rank 0 announces the next one half as far ahead."""


@dataclass(eq=False)
class OpenStep:
    """A step while this rank publishes it."""

    order: BeginPublish
    reason: str | None
    """Why this rank cannot take part in it."""
    nbytes: int = 0
    cpu: float = 0.0

    @property
    def step(self) -> int:
        return self.order.step

    @property
    def mode(self) -> Mode:
        return self.order.mode


@dataclass
class Pace:
    """How far ahead rank 0 announces the next occasion."""

    lead: int = 1
    calm: int = 0

    def ended(self, missed: bool) -> None:
        """Note whether a rank came too late for a step."""
        self.calm = 0 if missed else self.calm + 1
        if missed:
            self.lead = min(2 * self.lead, _MAX_LEAD)
        elif self.calm >= _CALM and self.lead > 1:
            self.lead, self.calm = self.lead // 2, 0


@dataclass(frozen=True)
class StepOutcome:
    """How a step ended, as rank 0 states it to all ranks."""

    occasion: int
    """The next one that is published."""
    mode: Mode
    epoch: int | None = None
    """That of the step; None: it is not published."""
    is_new: bool = True
    """Whether a record was put; else the chain had this very state."""
    reason: str | None = None
    """Why it is not published."""


class PublishWriter(OrderWriter):
    """Executes the orders of a trainer."""

    def __init__(self, settings: PublishSettings, ring: Ring, status: int, trainer: int, stack: ExitStack) -> None:
        """`status`: the descriptor for messages. `trainer`: the id of its process. `stack`: what ends with this."""
        self._settings, self._ring, self._status, self._trainer = settings, ring, status, trainer
        self._path, self._stack = settings.path, stack
        self._place = place_at(self._path)
        self._model = PublishedModel.from_bytes(settings.model.encode(), Path("the model of the run"))
        self._signing_key = None if settings.signing_key is None else bytes.fromhex(settings.signing_key)
        self._values = RankBuffers(self._model, settings.rank, is_signed=self._signing_key is not None)
        self._anchors = FoldAnchors(self._values, RankBuffers.nbytes_of(self._model, settings.rank))
        self._folds: dict[str, list[Any]] = {}
        """Those that end at the last published step, by how many steps they join, as plain data."""
        self._published_state: str | None = None
        """The hash of the last published values of this rank; None: it does not have them."""
        self._publication: Publication | None = None
        self._open: OpenStep | None = None
        self._seen_occasion = 0
        self._pace = Pace()
        self._notes: list[str] = []
        """The keys of receipts and outcomes that some rank may not have read yet. Of rank 0 only."""
        self._working = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        os.nice(_NICE)
        self._send("ready")

    def do(self, order: Any, data: bytes) -> None:
        """Execute an order."""
        if isinstance(order, WriteRuns):
            self._write(order)
            self._send("free")
        elif isinstance(order, NoteOccasion):
            self._seen_occasion = max(self._seen_occasion, order.occasion)
        elif isinstance(order, BeginPublish):
            if self._last is not None:
                self._last.result()
            self._seen_occasion = max(self._seen_occasion, order.occasion)
            self._open = OpenStep(order, order.reason, cpu=time.process_time())
            if order.reason is not None or order.mode == "open":
                self._end(self._open)
        elif isinstance(order, FinishSave) and self._open is not None:
            self._end(self._open)

    def close(self) -> None:
        """End the step that is on its way. One whose values are not complete is dropped."""
        self._working.shutdown(wait=True)

    def _seconds(self) -> float:
        """How long to wait for another rank."""
        return self._settings.seconds if os.getppid() == self._trainer else _ORPHAN_SECONDS

    def _write(self, order: WriteRuns) -> None:
        step = self._open
        if step is None or step.reason is not None:
            return
        slot = self._ring.slot(order.slot)
        try:
            for piece, _, offset, begin, nbytes in order.runs:
                self._values.fill(piece, offset, slot[begin : begin + nbytes].data)
        except Exception as error:
            step.reason = text_of(error)

    def _end(self, step: OpenStep) -> None:
        """Publish a step in the background."""

        def work() -> None:
            try:
                outcome = self._published(step)
            except Exception as error:
                self._send_failure(step, text_of(error), None, error)
                return
            if outcome.epoch is None:
                self._send_failure(step, outcome.reason or "not known", outcome)
                return
            result = {
                "epoch": outcome.epoch,
                "mode": step.mode,
                "is_new": outcome.is_new,
                "nbytes": step.nbytes,
                "cpu": time.process_time() - step.cpu,
            }
            self._send(f"published {json.dumps({**_next(step, outcome), **result})}")
            self._fold(step, outcome)
            if self._publication is not None and self._settings.keep is not None:
                with suppress(CkptError, OSError):  # the next step tries it again
                    remove_unneeded(self._publication, self._settings.keep)

        self._open = None
        self._last = self._working.submit(work)

    def _published(self, step: OpenStep) -> StepOutcome:
        """Take part in the publication of a step. Returns how it ended; raises if that is not known."""
        if step.mode == "open":
            self._opened()
            return StepOutcome(step.order.occasion, "start", 0)
        outcome = self._started(step) if step.mode == "start" else None
        if outcome is None:
            receipt = self._receipt(step)
            if self._settings.rank == 0:
                outcome = self._concluded(step, receipt)
            else:
                self._note(step, f"rank-{self._settings.rank:05d}", receipt)
                outcome = StepOutcome(**self._wait_for(step, "outcome"))
        if outcome.epoch is not None and step.reason is None:
            self._published_state = self._values.state()
            self._values.accept()
        return outcome

    def _started(self, step: OpenStep) -> StepOutcome | None:
        """Decide how the run goes on in the chain. Returns the outcome if no base is needed, or none is possible."""
        own: dict[str, Any] = {"step": step.step, "reason": step.reason, "state": None}
        if step.reason is None:
            own["state"] = self._values.state()
        if self._settings.rank:
            self._note(step, f"state-{self._settings.rank:05d}", own)
            there = self._wait_for(step, "start")
            return StepOutcome(**there) if there else None
        outcome = None
        try:
            states = self._gathered(step, "state", own)
            publication = self._opened()
            if publication.start(step.step, [one["state"] for one in states]).is_published:
                outcome = self._outcome(step, publication.epoch, is_new=False)
        except Exception as error:
            outcome = self._failed(step, text_of(error), isinstance(error, LockedError))
        self._state(step, "start", {} if outcome is None else vars(outcome))
        return outcome

    def _receipt(self, step: OpenStep) -> dict[str, Any]:
        """What this rank has stored of a step, or why it has stored nothing: plain data."""
        receipt: dict[str, Any] = {"step": step.step, "reason": step.reason}
        if step.reason is not None:
            return receipt
        is_base = step.mode != "delta"
        try:
            if step.mode == "delta" and self._published_state is None:
                raise IncompleteError("the process was started again, and has no values of the last published step")
            if is_base:
                receipt["base"] = self._stored(step, is_base=True)
            if self._published_state is not None and step.mode != "start":
                receipt["delta"], receipt["before"] = self._stored(step, is_base=False), self._published_state
                receipt["folds"] = self._folds
        except Exception as error:
            receipt["reason"] = step.reason = text_of(error)
        return receipt

    def _fold(self, step: OpenStep, outcome: StepOutcome) -> None:
        """Store the folds that end at a step that was published, for the receipt of the next one."""
        self._folds = {}
        if not self._settings.folds:
            return
        if step.reason is not None or not outcome.is_new:
            self._anchors.forget()
            return
        try:
            for one in self._anchors.note_step(is_base=step.mode != "delta"):
                share = one.encoded.share
                put_object(self._place, share.object, one.encoded.object)
                self._folds[str(one.length)] = [share.object.to_json(), share.state, one.before]
        except (CkptError, OSError):  # no follower needs a fold
            self._folds = {}
            self._anchors.forget()

    def _stored(self, step: OpenStep, is_base: bool) -> list[Any]:
        """Store the values of this rank. Returns the object and the hash of the state as plain data."""
        encoded = self._values.encode(is_base)
        put_object(self._place, encoded.share.object, encoded.object)
        step.nbytes += encoded.share.object.nbytes
        return [encoded.share.object.to_json(), encoded.share.state]

    def _concluded(self, step: OpenStep, receipt: Mapping[str, Any]) -> StepOutcome:
        """Commit a step that all ranks have stored, and state the outcome to all ranks."""
        try:
            receipts = self._gathered(step, "rank", receipt)
            publication = self._opened()
            before = None if publication.record is None else [one.state for one in publication.record.shares]
            bases = self._shares(receipts, "base")
            deltas = self._shares(receipts, "delta") if before == [one.get("before") for one in receipts] else None
            folds = {} if deltas is None else self._common_folds(receipts)
            if bases is not None:
                publication.commit(step.step, None, bases, None if publication.parent is None else deltas, folds)
            elif deltas is not None and publication.parent is not None:
                publication.commit(step.step, publication.parent, deltas, folds=folds)
            else:
                raise IncompleteError("ranks have stored deltas against another state than the last published one")
            outcome = self._outcome(step, publication.epoch)
        except Exception as error:
            outcome = self._failed(step, text_of(error), isinstance(error, LockedError))
        self._state(step, "outcome", vars(outcome))
        return outcome

    def _shares(self, receipts: Sequence[Mapping[str, Any]], kind: str) -> list[RankShare] | None:
        """What all ranks have stored of one kind; None unless all have."""
        check = FieldReader(self._path)
        if not all(kind in one for one in receipts):
            return None
        return [RankShare(ObjectRef.from_json(one[kind][0], check), one[kind][1]) for one in receipts]

    def _common_folds(self, receipts: Sequence[Mapping[str, Any]]) -> dict[int, FoldShares]:
        """The folds that all ranks have stored, by how many steps they join."""
        check = FieldReader(self._path)
        lengths = set.intersection(*(set(one.get("folds", {})) for one in receipts))
        rows = {length: [one["folds"][length] for one in receipts] for length in lengths}
        return {
            int(length): FoldShares(
                [RankShare(ObjectRef.from_json(row[0], check), row[1]) for row in of_ranks],
                [row[2] for row in of_ranks],
            )
            for length, of_ranks in rows.items()
        }

    def _outcome(self, step: OpenStep, epoch: int, is_new: bool = True) -> StepOutcome:
        self._pace.ended(missed=False)
        needs_base = self._publication is None or self._publication.needs_base()
        return StepOutcome(self._next_occasion(step), "base" if needs_base else "delta", epoch, is_new)

    def _failed(self, step: OpenStep, reason: str, is_lost: bool = False) -> StepOutcome:
        self._pace.ended(missed=MISSED in reason)
        mode: Mode = "base"
        if self._publication is None or is_lost:
            mode, self._publication = "start", None
            self._stack.close()
        elif MISSED in reason and not self._publication.needs_base():
            mode = "delta"
        return StepOutcome(self._next_occasion(step), mode, reason=reason[:_MAX_REASON])

    def _next_occasion(self, step: OpenStep) -> int:
        return max(step.order.occasion, self._seen_occasion) + self._pace.lead

    def _opened(self) -> Publication:
        """The chain, which this process alone extends. Raises `CkptError`."""
        if self._publication is None:
            files = {name: text.encode() for name, text in self._settings.files.items()}
            files |= {name: Path(path).read_bytes() for name, path in self._settings.paths.items()}
            changed = next(
                (name for name, ref in self._model.files.items() if ObjectRef.of(files[name]).hash != ref.hash), None
            )
            if changed is not None:
                raise InvalidArgumentError(
                    "the file was changed since the run began to publish", where=self._settings.paths.get(changed)
                )
            publication = self._entered(files)
            self._remove_notes_of_others()
            self._publication = publication
        return self._publication

    def _entered(self, files: Mapping[str, bytes]) -> Publication:
        """Take the right to publish. Raises `LockedError` if another process still has it after a while."""
        begin, patience = time.monotonic(), min(_PATIENCE_SECONDS, self._settings.seconds)
        while True:
            try:
                opened = open_publication(self._path, self._model, self._signing_key, files=files)
                return self._stack.enter_context(opened)
            except LockedError:
                if time.monotonic() - begin > patience:
                    raise
            time.sleep(0.1)

    def _gathered(self, step: OpenStep, what: str, own: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Wait for what all ranks have stored. Raises `IncompleteError` if one cannot take part, or says nothing."""
        others = range(1, self._settings.ranks)
        with ThreadPoolExecutor(min(len(others), _REQUESTS) or 1, "ckpt-receipts") as pool:
            every = [own, *pool.map(lambda rank: self._wait_for(step, f"{what}-{rank:05d}"), others)]
        for rank, one in enumerate(every):
            if one["reason"] is not None:
                raise IncompleteError(f"rank {rank}: {one['reason']}" if self._settings.ranks > 1 else one["reason"])
        if {one["step"] for one in every} != {step.step}:
            raise InvalidArgumentError(f"ranks publish different steps: {sorted({one['step'] for one in every})}")
        return every

    def _state(self, step: OpenStep, what: str, outcome: Mapping[str, Any]) -> None:
        """State something to all ranks, and remove what they have read before."""
        if self._settings.ranks == 1:
            return
        if step.mode != "start" or what == "outcome":
            with suppress(OSError, CkptError):
                self._place.delete(self._notes)
            self._notes.clear()
        self._note(step, what, outcome)
        receipts = [f"{kind}-{rank:05d}" for kind in ("rank", "state") for rank in range(1, self._settings.ranks)]
        self._notes += [self._key(step, one) for one in (what, *receipts)]

    def _note(self, step: OpenStep, what: str, content: Mapping[str, Any]) -> None:
        """Let other ranks know something of a step. What a killed process has noted before stays."""
        key, data = self._key(step, what), json.dumps(content).encode()
        if self._place.local is not None:
            (self._place.local / key).parent.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            self._place.create(key, data)

    def _wait_for(self, step: OpenStep, what: str) -> Mapping[str, Any]:
        """Wait for what another rank notes of a step. Raises `IncompleteError`."""
        begin, pause, key = time.monotonic(), _FIRST_PAUSE, self._key(step, what)
        while (there := self._place.read(key)) is None:
            if time.monotonic() - begin > self._seconds():
                rank = int(what[-5:]) if what[-5:].isdigit() else 0
                raise IncompleteError(
                    f"rank {rank} has not taken part in step {step.step} within {self._seconds():g} s"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, max(_LONGEST_PAUSE, self._place.look_seconds / 5))
        content: Mapping[str, Any] = json.loads(there[0])
        return content

    def _key(self, step: OpenStep, what: str) -> str:
        return f"{FOLDER}/receipts/{self._settings.token}/{step.step:010d}-{step.order.attempt}-{what}.json"

    def _remove_notes_of_others(self) -> None:
        """Remove what killed runs have left: nobody reads it."""
        place = self._place.within(f"{FOLDER}/receipts")
        with suppress(OSError, CkptError):
            place.remove({name.partition("/")[0] for name in place.list()} - {self._settings.token}, "")

    def _send_failure(
        self, step: OpenStep, reason: str, outcome: StepOutcome | None, error: Exception | None = None
    ) -> None:
        fields: dict[str, Any] = {"step": step.step} if outcome is None else _next(step, outcome)
        if isinstance(error, CkptError):
            facts = {
                name: None if one is None else str(one) for name, one in (("where", error.where), ("hint", error.hint))
            }
            fields["refusal"] = {"kind": type(error).__name__, "what": error.what[:_MAX_REASON], **facts}
        self._send(f"failed {json.dumps({**fields, 'error': reason[:_MAX_REASON]})}")


def _next(step: OpenStep, outcome: StepOutcome) -> dict[str, Any]:
    return {"step": step.step, "next": outcome.occasion, "next_mode": outcome.mode}


def main() -> None:
    with ExitStack() as stack:
        execute_orders(PublishSettings, PUBLISH_ORDERS, partial(PublishWriter, stack=stack))


if __name__ == "__main__":
    main()
