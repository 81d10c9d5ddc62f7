"""The process beside a rank that writes its saves: it hashes, encodes and flushes, and rank 0's publishes.

`python -m ckpt_training.writing.save_process RING STATUS TRAINER` starts it, with two descriptors and a process id. It
has a low priority. It reads the settings and then orders from its standard input (`save_orders`).

It sends lines to the trainer: `ready`, `free` for each slot that may be used again, and after each save `saved JSON` or
`failed JSON`; if a job follows a save, later `then JSON`. If the trainer is killed, a save whose values were all given
is still published, any other is dropped.
"""

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ckpt.chains.change import change
from ckpt.chains.write import member_of
from ckpt.pipeline import Execution
from ckpt.pipeline.scratch import scratch_folder
from ckpt.protection.protect import run_protect
from ckpt.protection.protect_plan import plan_protect
from ckpt_codecs.delta import StepInfo
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, OutputError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.universal.boxes import RankPack, RankValues
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.manifest import Manifest, Parent
from ckpt_training.writing.peer_saves import PeerSaves
from ckpt_training.writing.rank_notes import RankNotes, merged
from ckpt_training.writing.ring import Ring
from ckpt_training.writing.save_formats import Deltas, RankReceipt, SaveFile, format_of
from ckpt_training.writing.save_orders import (
    SAVE_ORDERS,
    BeginSave,
    DropSave,
    FinishSave,
    SaveSettings,
    WriteRuns,
    box_of_row,
    path_of_step,
)
from ckpt_training.writing.staged_save import FolderSave, SaveOutcome, StagedSave
from ckpt_training.writing.stored_save import StoredSave
from ckpt_training.writing.then_job import ThenJob
from ckpt_training.writing.trainer_messages import OrderWriter, execute_orders, text_of

_ORPHAN_SECONDS = 10.0
"""How long to wait for the other ranks after the trainer has ended."""
_SEEN_SECONDS = 5.0
"""How long to wait at the end until the other ranks have read the outcome of the last save."""
_NICE = 10
"""Added to the priority of the trainer. With 19, a process makes no progress where all cores are busy."""
_RESOURCES = Execution(workers=1, memory=64 << 20)
_MAX_REASON = 1000


@dataclass(frozen=True)
class PublishedSave:
    """The last save that was published, for the deltas of the next one."""

    step: int
    content: str
    values: RankValues
    """The values of this rank."""
    counts: Mapping[str, tuple[int, int]]
    """For each parameter, the number of its steps, and the number of its group's options."""
    deltas: int
    """The number of members of the chain since the last base, that one included."""


@dataclass(eq=False)
class OpenSave:
    """A save while this rank writes it. After a failure it only waits for its end."""

    step: int
    stage: StagedSave
    file: SaveFile[RankReceipt] | None = None
    against: PublishedSave | None = None
    """The save before, if there are deltas against it."""
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    values: Path | None = None
    failure: str | None = None
    cpu: float = 0.0
    manifest: Manifest | None = None
    """What rank 0 has published, if that is universal."""

    def fail(self, error: Exception) -> None:
        """Note why the save cannot be complete. The first reason counts."""
        self.failure = self.failure or text_of(error)


class SaveWriter(OrderWriter):
    """Executes the orders of a trainer."""

    def __init__(self, settings: SaveSettings, ring: Ring, status: int, trainer: int, scratch: Path) -> None:
        """`status`: the descriptor for messages. `trainer`: the id of its process. `scratch`: a folder for values."""
        self._settings, self._ring, self._status, self._trainer, self._scratch = (
            settings,
            ring,
            status,
            trainer,
            scratch,
        )
        self._format = format_of(settings)
        self._open: OpenSave | None = None
        self._published: PublishedSave | None = None
        self._unseen: list[StagedSave] = []
        """Stages of rank 0 whose outcome some rank may not have read yet."""
        self._numbers = count()
        self._finishing = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self._then = None if settings.then is None or settings.rank else ThenJob(*settings.then)
        self._jobs = ThreadPoolExecutor(1)
        self._peers = None if settings.peers is None else PeerSaves(settings, self._send)
        os.nice(_NICE)
        self._send("ready")

    def do(self, order: Any, data: bytes) -> None:
        """Execute an order. `data`: its bytes."""
        if isinstance(order, WriteRuns):
            self._write(order)
            self._send("free")
        elif isinstance(order, BeginSave):
            self._open = self._opened(order)
        elif isinstance(order, DropSave):
            save = self._open or OpenSave(order.step, self._stage(order.step))
            if save.stage.target.exists():
                self._send_failure(order.step, order.reason)
            else:
                self._end(replace(save, failure=save.failure or order.reason), b"")
        elif isinstance(order, FinishSave) and self._open is not None:
            self._end(self._open, data)

    def close(self) -> None:
        """Drop the save that is not complete, and end those that are."""
        if self._open is not None:
            self._end(replace(self._open, failure="its trainer has ended"), b"")
        self._finishing.shutdown(wait=True)
        begin = time.monotonic()
        while self._unseen and time.monotonic() - begin < _SEEN_SECONDS:
            self._remove_seen()
            time.sleep(0.02)
        for stage in self._unseen:
            stage.close(remove=True)
        self._jobs.shutdown(wait=True)
        if self._peers is not None:
            self._peers.close(is_orphan=os.getppid() != self._trainer)

    def _seconds(self) -> float:
        """How long to wait for another rank."""
        return self._settings.seconds if os.getppid() == self._trainer else _ORPHAN_SECONDS

    def _stage(self, step: int) -> StagedSave:
        kind = StoredSave if is_remote(self._settings.path) else FolderSave
        return kind(self._settings, self._format, step, self._seconds, self._scratch)

    def _opened(self, order: BeginSave) -> OpenSave:
        if self._settings.deltas and self._last is not None:
            self._last.result()  # the outcome of the save before decides what deltas are against
        save = OpenSave(order.step, self._stage(order.step), cpu=time.process_time())
        try:
            save.stage.begin()
            save.counts = {name: (steps, row) for name, (steps, row) in dict(order.counts).items()}
            save.against = None if self._needs_base else self._published
            counts = {} if save.against is None else save.against.counts
            steps = {
                name: StepInfo(counts[name][0], after, order.options[row])
                for name, (after, row) in save.counts.items()
                if name in counts
            }
            if self._settings.deltas or self._settings.codec is not None:
                save.values = self._scratch / f"values-{next(self._numbers)}"
            save.file = self._format.begin(
                save.stage.data,
                [box_of_row(row) for row in order.boxes],
                f"{self._settings.token}:{order.step}",
                save.values,
                Deltas(None if save.against is None else save.against.values, steps),
            )
        except Exception as error:
            save.fail(error)
        return save

    @property
    def _needs_base(self) -> bool:
        if not self._settings.deltas or self._published is None:
            return True
        every = self._settings.base_every
        return every is not None and self._published.deltas >= every

    def _write(self, order: WriteRuns) -> None:
        save = self._open
        if save is None or save.file is None or save.failure is not None:
            return
        slot = self._ring.slot(order.slot)
        try:
            for box, state, offset, begin, nbytes in order.runs:
                save.file.add(box, state, offset, slot[begin : begin + nbytes].data)
        except Exception as error:
            save.fail(error)

    def _end(self, save: OpenSave, notes: bytes) -> None:
        """Finish a save in the background. `notes`: the line of this rank's `RankNotes`."""

        def finish() -> None:
            try:
                self._finish(save, notes)
            except Exception as error:
                self._send_failure(save.step, text_of(error))

        self._open = None
        self._last = self._finishing.submit(finish)

    def _finish(self, save: OpenSave, notes: bytes) -> None:
        """Write the rest, and take part in the publication. Reports how the save ended."""
        receipt: RankReceipt | None = None
        tag = ""
        try:
            if save.failure is None and save.file is not None:
                receipt = save.file.finish()
                tag = save.stage.deliver(self._format.file(self._settings.rank))
        except Exception as error:
            save.fail(error)
        outcome: SaveOutcome | None = None
        if self._settings.rank == 0:
            self._unseen.append(save.stage)
        try:
            against = None if save.against is None else save.against.content
            head = json.dumps({"error": save.failure, "against": against, "tag": tag}).encode() + b"\n"
            save.stage.hand_over(head + (b"" if receipt is None else notes + receipt.to_bytes()))
            outcome = save.stage.outcome() if self._settings.rank else self._concluded(save)
        except Exception as error:
            save.fail(error)
            if self._settings.rank == 0:
                self._give_up(save)
        published = outcome is not None and outcome.content is not None
        if self._peers is not None and outcome is not None and outcome.sent_at is not None:
            self._peers.send(save.stage.target, save.step, outcome.sent_at, save.manifest)
        self._remember(save, outcome)
        if self._settings.rank:
            save.stage.close()
        self._remove_seen()
        reason = save.failure or (None if outcome is None else outcome.error)
        result = {
            "step": save.step,
            "path": str(save.stage.target),
            "kind": "" if outcome is None else outcome.kind,
            "nbytes": 0 if receipt is None else receipt.nbytes,
            "cpu": time.process_time() - save.cpu,
            "has_job": self._then is not None,
        }
        if published:
            self._send(f"saved {json.dumps(result)}")
            if self._then is not None:
                self._jobs.submit(self._follow, self._then, save.step, str(save.stage.target))
        else:
            self._send_failure(save.step, reason or "not known")

    def _follow(self, job: ThenJob, step: int, path: str) -> None:
        """Run the job after a published save, and report how it ended."""
        self._send(f"then {json.dumps({'step': step, 'job_error': job.run(path)})}")

    def _remember(self, save: OpenSave, outcome: SaveOutcome | None) -> None:
        """Keep the values of a published save for the next one, and remove those that nothing needs any more."""
        before = self._published
        if outcome is None:  # nobody knows whether it was published: the next one begins anew
            self._published = None
        elif outcome.content is not None and isinstance(save.file, RankPack) and self._settings.deltas:
            deltas = 1 if outcome.kind == "base" or before is None else before.deltas + 1
            values = save.file.rank_values
            self._published = PublishedSave(save.step, outcome.content, values, save.counts, deltas)
        needed = None if self._published is None else self._published.values.path
        for path in (save.values, None if before is None else before.values.path):
            if path is not None and path != needed:
                path.unlink(missing_ok=True)
        if save.file is not None:
            with suppress(Exception):
                save.file.__exit__(None, None, None)

    def _concluded(self, save: OpenSave) -> SaveOutcome:
        """The outcome of a save, which rank 0 states to all ranks."""
        try:
            outcome = self._publish(save)
        except Exception as error:
            outcome = SaveOutcome(error=text_of(error))
        save.stage.state(outcome)
        return outcome

    def _give_up(self, save: OpenSave) -> None:
        """Tell the other ranks that rank 0 cannot publish a save."""
        try:
            save.stage.state(SaveOutcome(error=save.failure))
        except Exception:  # the disk is full: no rank waits for a folder that is gone
            self._unseen.remove(save.stage)
            save.stage.close(remove=True)

    def _publish(self, save: OpenSave) -> SaveOutcome:
        """Make a checkpoint of what all ranks have written, and publish it."""
        stage, receipts, notes = save.stage, list[RankReceipt](), list[RankNotes]()
        against, tags = set[str](), list[str]()
        for rank, body in enumerate(stage.receipts()):
            head, _, rest = body.partition(b"\n")
            fields = json.loads(head)
            if fields["error"] is not None:
                reason = fields["error"]
                raise IncompleteError(f"rank {rank}: {reason}" if self._settings.ranks > 1 else reason)
            against |= {fields["against"]} - {None}
            tags.append(fields["tag"])
            line, _, receipt = rest.partition(b"\n")
            notes.append(RankNotes.from_bytes(line))
            receipts.append(self._format.receipt(receipt, stage.target))
        if len({one.step for one in notes}) > 1:
            raise InvalidArgumentError(f"ranks save different steps: {sorted({one.step for one in notes})}")
        before = self._published
        if against - {None if before is None else before.content}:
            raise IncompleteError("ranks have deltas against different saves")
        parent = None
        if against and before is not None:
            parent = Parent(before.content, f"../{path_of_step(self._settings.path, before.step).name}")
        files = [
            Receipt(self._format.file(receipt.number), receipt.nbytes, (), {}, e_tag=tag)
            for receipt, tag in zip(receipts, tags, strict=True)
        ]
        all_notes, elsewhere = merged(notes, stage.target), is_remote(self._settings.path)
        assembled = stage.assemble(
            files, lambda folder: self._format.assemble(folder, receipts, all_notes, parent, elsewhere=elsewhere)
        )
        if self._settings.protect is not None:
            # When the save appears, it has its parity: no moment is left in which a loss is not replaced.
            run_protect(plan_protect(stage.data, self._settings.protect), resources=_RESOURCES)
        manifest = assembled.manifest
        if self._settings.is_chain and manifest is not None:
            self._append(stage, manifest)
        else:
            stage.publish()
        sent_at = None if self._peers is None else self._peers.takes(save.step)
        if sent_at is not None:
            save.manifest = manifest
        kind = "base" if manifest is None or manifest.parent is None else "delta"
        return SaveOutcome(assembled.content, kind, sent_at=sent_at)

    def _append(self, stage: StagedSave, manifest: Manifest) -> None:
        """Publish a save as the last member of the chain."""
        with change(self._settings.path, _RESOURCES, create=True, wait=self._seconds()) as place:
            chain = place.chain or ChainIndex(())
            last = chain.members[-1] if chain.members else None
            if last is not None and stage.step <= last.step:
                raise OutputError(
                    f"step {stage.step} is not after {last.step}, the chain's last step",
                    where=self._settings.path,
                    hint="If the run started again from an earlier step, save into another chain.",
                )
            if manifest.parent is not None and (last is None or last.content != manifest.parent.content):
                raise OutputError(
                    "another process has changed the chain since the last save", where=self._settings.path
                )
            stage.publish()
            added = place.look() / stage.target.name
            try:
                member = member_of(added, manifest, stage.step)
            except BaseException:
                place.remove([added])
                raise
            place.add(ChainIndex((*chain.members, member), chain.segments), member.folder)
            if chain.tip is not None:
                place.remove_unneeded([place.look() / chain.tip.folder])

    def _remove_seen(self) -> None:
        for stage in [one for one in self._unseen if one.was_seen()]:
            stage.close(remove=True)
            self._unseen.remove(stage)

    def _send_failure(self, step: int, reason: str) -> None:
        self._send(f"failed {json.dumps({'step': step, 'error': reason[:_MAX_REASON]})}")


def main() -> None:
    with scratch_folder(None) as scratch:
        execute_orders(SaveSettings, SAVE_ORDERS, partial(SaveWriter, scratch=scratch))


if __name__ == "__main__":
    main()
