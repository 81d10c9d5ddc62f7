"""Send what a rank records to the hosts that hold it."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import Peers
from ckpt.holding.sender import Sender
from ckpt.holding.sent_file import SentFile, shares
from ckpt_formats.core.errors import CkptError
from ckpt_formats.stores.piece_requests import HELD_FILES
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, Member
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import rank_file

_LOOK_SECONDS = 0.5
"""From one look at the list of the chain to the next."""


class LogSender(Sender):
    """Sends the log of a rank, and rank 0's the list and the base of the chain; with parity, all ranks the base."""

    def __init__(self, peers: Peers, segment: Path, rank: int, say: Callable[[str, str], None]) -> None:
        """Start at once. `segment`: the folder of the segment; `say`: as of `Sender`.

        Raises `CkptError` if the layout of the segment cannot be read.
        """
        layout = layouts.load(segment / layouts.NAME)
        self._segment = segment
        self._seen: tuple[int, ...] = ()
        """The list of the chain, at the last look."""
        files: dict[str, SentFile] = {}
        status = (segment / layouts.NAME).stat()
        if rank == 0:
            files[f"{segment.name}/{layouts.NAME}"] = SentFile(segment / layouts.NAME, status.st_size, True)
        files[f"{segment.name}/{rank_file(rank)}"] = SentFile(segment / rank_file(rank), 0)
        generation = SentGeneration(
            peers.run_of(segment.parent.name),
            layout.run,
            status.st_mtime_ns,
            len(layout.ranks),
            lambda rank: f"{segment.name}/{rank_file(rank)}",
            layout.first,
            is_recorded=True,
        )
        super().__init__(peers, generation, rank, files, say, has_base=False)
        if self._follows_chain:
            threading.Thread(target=self._follow_chain, daemon=True).start()

    def advance(self, nbytes: int, kind: Kind, step: int) -> None:
        """Note that the log has a further record, and ends there."""
        with self.queue.change() as files:
            file = files[self.queue.main]
            file.nbytes = nbytes
            if kind is Kind.FINGERPRINT and file.start_end is None:
                file.start_end = nbytes  # it follows the states at the start
            if kind is Kind.GRADIENTS or not file.ends:
                file.ends.append(nbytes)
                file.steps.append(step)

    def close(self, seconds: float) -> None:
        if self._follows_chain:
            with suppress(CkptError, OSError):
                self._look_at_chain()
        super().close(seconds)

    @property
    def _follows_chain(self) -> bool:
        """Whether the rank sends files of the chain besides its log."""
        return self.queue.rank == 0 or bool(self.queue.streams)

    @property
    def _has_parts(self) -> bool:
        """With parity, whether it is known which files of the base the ranks send. No later base is sent then.

        The log from the start is there, and a base would be held beside it.
        """
        return bool(self.queue.streams and self._seen)

    def _follow_chain(self) -> None:
        """Send the list of the chain and its base as soon as they are there."""
        while not self.queue.is_closing and not self._has_parts:
            with suppress(CkptError, OSError):
                self._look_at_chain()
            time.sleep(_LOOK_SECONDS)

    def _look_at_chain(self) -> None:
        """Take the list of the chain and the files of its base, if the list is another one than at the last look."""
        path, has_parity, rank = self._segment.parent / chain_file.NAME, bool(self.queue.streams), self.queue.rank
        status = path.stat()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen or self._has_parts:
            return
        chain = chain_file.load(path)
        logged = next((one for one in chain.segments if one.folder == self._segment.name), None)
        if logged is None or logged.run != self.queue.generation.name:
            return
        members = self._base_of(chain, logged)
        if logged.parent is not None and not members:
            return  # nothing from which a replay can begin
        base = self._files_of(chain, members)
        contents = {one.content for one in members}
        line = logged if logged.parent in contents else replace(logged, parent=None)
        content = chain_file.dump(ChainIndex(members, (replace(line, step=None),)))
        sizes = {name: path.stat().st_size for name, path in base.items()}
        parts = shares(sizes, self.queue.generation.world) if has_parity else []
        sent = {
            name: SentFile(base[name], sizes[name], start_end=sizes[name] if has_parity else None)
            for name in (parts[rank] if has_parity else base)
        }
        if has_parity and base and rank == 0:
            sent[HELD_FILES] = SentFile.of_bytes(json.dumps({"files": sizes}).encode(), self._segment)
        with self.queue.change() as files:
            if self._has_parts:
                return  # another thread looked at the same time
            if self.watch is not None:
                self.watch.parts = parts
            before = files.pop(chain_file.NAME, None)
            for name in [one for one in files if not one.startswith(f"{self._segment.name}/") and one not in base]:
                del files[name]  # the chain was compacted
            for name, file in sent.items():
                files.setdefault(name, file)
            if rank == 0:
                if before is None or before.content != content:
                    version = 1 if before is None else before.version + 1
                    before = SentFile.of_bytes(content, self._segment, version)
                files[chain_file.NAME] = before  # it comes last: what it names is held then
            self._seen, self.queue.has_base = seen, True

    def _files_of(self, chain: ChainIndex, members: tuple[Member, ...]) -> dict[str, Path]:
        """The files of a base, by their names in the chain."""
        root = self._segment.parent
        folders = sorted(chain.folders_of(members[-1])) if members else []
        paths = [path for name in folders for path in sorted((root / name).rglob("*")) if path.is_file()]
        return {path.relative_to(root).as_posix(): path for path in paths}

    def _base_of(self, chain: ChainIndex, logged: LoggedSteps) -> tuple[Member, ...]:
        """The last base of a segment; with parity, that from which it begins, if it does not have its start itself."""
        if not self.queue.streams:
            return chain.base_of(logged)
        first = () if logged.parent is None else chain.base_of(replace(logged, step=logged.first))
        return first if first or logged.parent is None else chain.base_of(logged)

    def _is_compacted(self, name: str, file: SentFile) -> bool:
        is_of_base = file.content is None and not name.startswith(f"{self._segment.name}/")
        if not is_of_base or file.path.exists() or not (self._segment / layouts.NAME).exists():
            return False
        file.is_gone = True
        return True
