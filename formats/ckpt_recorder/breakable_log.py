"""The log of a rank, which may break while the run goes on: then nothing is recorded, and a warning says so once."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

from ckpt.holding.peers import changed_states
from ckpt_formats.core.errors import CkptError, OutputError
from ckpt_recorder.options import RecorderOptions, RecorderWarning
from ckpt_recorder.recording import RankRecording
from ckpt_training.writing.link import WriterBroken

_LOG = logging.getLogger("ckpt_recorder")
_P = ParamSpec("_P")


class BreakableLog:
    """What a rank records, as long as that works.

    Attributes:
        recording: The segment that is being recorded; None if there is none.
        broken: Why nothing is recorded at the moment; None if the recording works.
        peers: Of each host that should hold what this rank records: "holds all", or why it does not.
    """

    def __init__(
        self, chain: Path, options: RecorderOptions, step: Callable[[], int], on_end: Callable[[], None]
    ) -> None:
        """`step`: gives the current step of the run. `on_end`: is called before the writer of a segment is ended."""
        self.recording: RankRecording | None = None
        self.broken: str | None = None
        self.peers: dict[str, str] = {}
        self._chain, self._options, self._step, self._on_end = chain, options, step, on_end

    @property
    def working(self) -> RankRecording | None:
        """The segment, if it is recorded at the moment."""
        return None if self.broken is not None else self.recording

    @property
    def retries(self) -> str:
        """When the recorder tries to record again, for `warn`."""
        return f"; the recorder tries again every {self._options.retry} steps"

    def record(
        self, work: Callable[Concatenate[RankRecording, _P], None], *arguments: _P.args, **named: _P.kwargs
    ) -> None:
        """Call a method of the recording unless it is broken; if it breaks now, warn once."""
        recording = self.working
        if recording is None:
            return
        try:
            work(recording, *arguments, **named)
            self._follow_peers(recording.peers)
        except (WriterBroken, CkptError) as error:
            self.end(str(error))
            self.warn(str(error), self.retries)

    def begin(self, recording: RankRecording) -> None:
        """Record into a new segment from now on, from its start, of which each state counts."""
        self.recording, self.broken = recording, None

    def end(self, reason: str | None) -> None:
        """End the writer. `reason`: why the recording is broken, if it is."""
        self._on_end()
        recording, self.recording = self.recording, None
        late = recording.close() if recording is not None else None
        self.broken = reason or self.broken or late

    def forget(self, reason: str) -> None:
        """Record nothing more, and leave the writer to the process that has it. `reason`: why."""
        self.broken, self.recording = reason, None

    def warn(self, reason: str, again: str) -> None:
        """Warn that nothing is recorded. `again`: what may change that. Raises `OutputError` if the user wants that."""
        if self._options.when_broken == "raise":
            raise OutputError(f"the log of gradients cannot be written: {reason}", where=self._chain)
        warnings.warn(
            f"step {self._step()} and later steps are not recorded into {self._chain}: {reason}"
            + (again if self._options.retry else ""),
            RecorderWarning,
            stacklevel=3,
        )

    def _follow_peers(self, peers: dict[str, str]) -> None:
        """Log what has changed of the hosts that hold the log."""
        for line, holds_all in changed_states(self._step(), peers, self.peers):
            _LOG.log(logging.INFO if holds_all else logging.WARNING, line)
