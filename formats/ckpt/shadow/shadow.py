"""Follow the log of a chain, from segment to segment, with the states of its last step in memory."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.pipeline import Execution, Resources
from ckpt.shadow.bases import add_base
from ckpt.shadow.described import PartOfState
from ckpt.shadow.turns import Turns
from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from ckpt_formats.stores.location import local_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, Member
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.gradients.held import HeldState
from ckpt_formats.universal.gradients.parts import StatePart
from ckpt_formats.universal.gradients.segment import rank_file
from ckpt_formats.universal.gradients.state import Base

if TYPE_CHECKING:
    from ckpt.shadow.mirror import LogMirror  # few shadows follow a log elsewhere

_BAND = 8
"""The maximum number of steps that are applied at once, while nobody can read."""
_BAND_ELEMENTS = 1 << 31
"""The maximum number of gradients that are applied at once, if that is more than one step."""


_FETCHING_SECONDS = 0.002
"""How long to wait for bytes that are on their way, or for a step that another thread applies."""


@dataclass(frozen=True)
class ShadowStatus:
    """Where a shadow is.

    Attributes:
        step: The step of the states; None before the start of the log is complete.
        verified: The last step whose states had the hashes that the run recorded.
        segment: The name of the folder of the segment.
        parameters: The number of elements that each step changes here.
        nbytes: The bytes of all states in memory.
        lag_nbytes: The bytes of the log that were not applied yet.
        lag_steps: About how many steps that is.
        steps: The number of steps that were applied since the shadow began.
        seconds: The time that these took.
        waiting: Why the next bytes of a file are not a complete record; mostly they are still being written.
        damage: Which later steps of the log cannot be applied, because records are damaged; None: none are known.
    """

    step: int | None
    verified: int | None
    segment: str | None
    parameters: int
    nbytes: int
    lag_nbytes: int
    lag_steps: int
    steps: int
    seconds: float
    waiting: str | None
    damage: str | None

    @property
    def rate(self) -> float:
        """Elements that were stepped in a second."""
        return self.parameters * self.steps / self.seconds if self.seconds else 0.0


class Shadow:
    """The states of a recorded run at its last complete step, or a part of them. The run does not notice it.

    One thread calls `poll`. Others may call `frozen` and `status` meanwhile.
    """

    @checked
    def __init__(
        self,
        chain: "StrPath | LogMirror",
        *,
        resources: Resources | None = None,
        base_every: int | None = None,
        part: StatePart | None = None,
    ) -> None:
        """Nothing is read before the first `poll`.

        `chain`: its folder, or what is fetched of it from elsewhere; `base_every`: `poll` stops where a base is due
        (see `base_due`); `part`: hold no more of the state than that. Raises `InvalidArgumentError` for bases of a
        part, and of a chain elsewhere.
        """
        self.mirror = None if isinstance(chain, (str, os.PathLike)) else chain
        self.path = local_path(chain) if isinstance(chain, (str, os.PathLike)) else chain.path
        self.resources = Execution.of(resources)
        self.part = part
        if base_every is not None and part is not None:
            raise InvalidArgumentError(
                "a shadow with a part of the state cannot write bases",
                hint="Let one without --part do that, or the run itself: `Recorder(bases=Bases(every=N))`.",
            )
        if base_every is not None and self.mirror is not None:
            raise InvalidArgumentError(
                "a shadow that follows a log over a socket cannot write bases",
                hint="Let a shadow do that where the chain is, or the run itself: `Recorder(bases=Bases(every=N))`.",
            )
        self.base_every = base_every
        self.has_more = False
        """Is it worth calling `poll` again without waiting?"""
        self.damage: CorruptError | None = None
        """Why no further step can be applied: records of the log are damaged. A repair of the log ends this."""
        self._last_base = 0
        self._holds: list[int] = []
        self._turns = Turns()
        self._state: HeldState | None = None
        self._limit: int | None = None
        self._has_next = False
        """Does the chain have a later segment than the one that is followed?"""
        self._seen: tuple[int, ...] | None = None
        self._steps, self._seconds = 0, 0.0
        self._start_nbytes, self._start_steps = 0, 0

    @property
    def step(self) -> int | None:
        """The step of the states; None if there are none yet."""
        return None if self._state is None else self._state.step

    @property
    def verified(self) -> int | None:
        """The last step whose states had the hashes that the run recorded."""
        return None if self._state is None else self._state.verified

    @checked
    def poll(self, upto: int | None = None) -> int:
        """Apply some of the steps that appeared, none after `upto`. Returns how many: 0 if there are no more now.

        Raises `NotFoundError` if the chain has no log, `CorruptError` if the log is damaged or gives other values than
        the run had, and other `CkptError`s. After an error, nothing can be read.
        """
        if self.mirror is None:
            return self._poll(upto)
        path = self.mirror.ready_path()
        if path is None:
            time.sleep(_FETCHING_SECONDS)
            self.has_more = True
            return 0
        is_behind = self.mirror.is_behind  # before the files are looked at
        if self.path != path:
            before, self.path = self.path, path
            with self._turns.writing():
                self._state = self._seen = None
            self.mirror.forget(before)
        steps = self._poll(upto)
        if self._state is not None:
            self.mirror.applied(self._state.tail.folder, self._state.step)
        if not steps and not self.has_more and is_behind:
            time.sleep(_FETCHING_SECONDS)
            self.has_more = True
        return steps

    def _poll(self, upto: int | None) -> int:
        state, self.has_more = self._state, False
        if state is None:
            self.damage = None
            self._open()
            self.has_more = self._state is not None
            return 0
        try:
            last = state.tail.poll(self._band(state))
        except IncompleteError:  # a file was removed
            if not self._list_changed():
                raise
            self._follow_list(state)
            self.has_more = True
            return 0
        limits = [one for one in (last, self._limit, upto, self._stop(state, last)) if one is not None]
        step = max(state.step, min(*limits, *self._holds, state.step + self._band(state)))
        if step > state.step or step in state.tail.fingerprints():
            self.has_more, self.damage = True, None
            return self._advance(state, step)
        changed = self._list_changed()
        if changed or (self._has_next and state.step == self._limit):
            self._follow_list(state)
            self.has_more = changed or self._state is not state  # the next poll says what the new list means
        elif upto is None and not self._holds:
            self.damage = self._damage(state, self._limit)
        return 0

    def _damage(self, state: HeldState, limit: int | None) -> CorruptError | None:
        """Why a segment has no further steps; None if it may grow. `limit`: the last one that the chain states."""
        damage = state.tail.damage(limit, is_complete=self.mirror is None)
        if damage is not None:
            damage.hint = "`ckpt verify` names all damage of the chain, and `ckpt repair` repairs what has parity."
        return damage

    @property
    def base_due(self) -> bool:
        """Is a base due at this step? Only at a step of which the run recorded hashes, and the states have them."""
        state = self._state
        return state is not None and state.verified == state.step and self._is_due(state.step)

    def write_base(self) -> Member:
        """Write the state as a base, check what was written, and add it to the chain. Returns the new member.

        The shadow starts from it when it is started again. If this fails, the chain is unchanged. Raises `CkptError`.
        """
        state = self._state
        if state is None:
            raise IncompleteError("the log of gradients has no complete state yet", where=self.path)
        self._last_base = state.step  # after a failure, the next one is due later

        def check(written: Checkpoint) -> None:
            state.check_equal(written.parameters, self.resources.workers)

        with self.frozen() as checkpoint:
            member = add_base(self.path, checkpoint, state.step, state.tail.folder.name, check, self.resources)
        state.rebase(open_member(self.path, chain_file.read(self.path), member))
        return member

    @contextmanager
    def frozen(self, seconds: float | None = None) -> Iterator[Checkpoint]:
        """The state between two steps. Within the context no step is applied; afterwards it must not be read.

        `seconds`: how long to wait for others; None: without limit. Raises `IncompleteError` if that is not enough or
        if there is no state yet, and the error of a step that failed.
        """
        with self.frozen_part(seconds) as (checkpoint, _):
            yield checkpoint

    @contextmanager
    def frozen_part(
        self, seconds: float | None = None, step: int | None = None
    ) -> Iterator[tuple[Checkpoint, PartOfState | None]]:
        """The same, and which part of the state this is. `step`: wait until the shadow is there (see `not_beyond`).

        Raises `IncompleteError` if it does not reach the step in so many seconds, or has gone beyond it.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._turns.reading(remaining) as entered:
                if not entered:
                    raise IncompleteError("the shadow is busy", where=self.path, hint="Try again later.")
                state = self._state
                if state is None:
                    raise IncompleteError("the log of gradients has no complete state yet", where=self.path)
                if step is None or step == state.step:
                    yield _described(state)
                    return
                if state.step > step:
                    raise IncompleteError(f"the shadow is at step {state.step}, after {step}", hint="Try again later.")
            if deadline is not None and time.monotonic() > deadline:
                raise IncompleteError(f"the shadow did not reach step {step} in time", hint="Try again later.")
            time.sleep(_FETCHING_SECONDS)

    @contextmanager
    def not_beyond(self, step: int) -> Iterator[None]:
        """Within, no step after this one is applied."""
        self._holds.append(step)
        try:
            yield
        finally:
            self._holds.remove(step)

    @property
    def status(self) -> ShadowStatus:
        """Where the shadow is."""
        state, damage = self._state, None if self.damage is None else self.damage.what
        if state is None:
            return ShadowStatus(None, None, None, 0, 0, 0, 0, 0, 0.0, None, damage)
        tail = state.tail
        elsewhere = 0 if self.mirror is None else self.mirror.lag_nbytes
        lag = elsewhere + max(0, _files_nbytes(tail.folder, len(tail.layout.ranks)) - tail.applied_nbytes)
        each = (tail.applied_nbytes - self._start_nbytes) / max(1, state.step - self._start_steps)
        lag_steps = round(lag / each) if each > 0 else 0
        waiting = next(iter(tail.torn.values()), None) if lag else None
        if self.mirror is not None and self.mirror.broken is not None:
            waiting = f"no connection: {self.mirror.broken}"
        return ShadowStatus(
            *(state.step, state.verified, tail.folder.name, state.numel, state.nbytes, lag, lag_steps),
            *(self._steps, self._seconds, waiting, damage),
        )

    def _band(self, state: HeldState) -> int:
        return max(1, min(_BAND, _BAND_ELEMENTS // max(1, state.tail.layout.numel)))

    def _stop(self, state: HeldState, last: int) -> int | None:
        """The first step after this one where a base is due; None: there is none up to `last`."""
        if self.base_every is None:
            return None
        ranks = len(state.tail.layout.ranks)
        steps = range(max(state.step + 1, self._last_base + self.base_every), last + 1)
        return next(
            (step for step, of in state.tail.fingerprints().items() if step in steps and len(of) == ranks), None
        )

    def _is_due(self, step: int) -> bool:
        return self.base_every is not None and step >= self._last_base + self.base_every

    def _advance(self, state: HeldState, step: int) -> int:
        with self._turns.writing():
            began = time.perf_counter()
            step = max(state.step, min(step, *self._holds)) if self._holds else step  # of a reader that just left
            count = step - state.step
            state.advance(step, self.resources.workers)
        self._steps += count
        self._seconds += time.perf_counter() - began
        return count

    def _open(self) -> None:
        """Load the state of the last segment, or the end of one before while the start of the last is not complete."""
        chain = self._read_list()
        following: LoggedSteps | None = None
        for logged in reversed(chain.segments):
            if following is not None and logged.step != following.first:
                return
            state = self._find(chain, logged)
            if state is not None:
                self._load(logged, state)
                self._has_next = following is not None
                return
            following = logged

    def _load(self, logged: LoggedSteps, state: HeldState) -> None:
        if self.base_every is not None and not state.tail.window().is_exact:
            raise UnsupportedError("a replay of this log is approximate: its states cannot be bases", where=self.path)
        with self._turns.writing():
            self._state = None  # the states of the last segment are freed first
            state.load(self.resources.workers)
            self._state, self._limit = state, logged.step

    def _find(self, chain: ChainIndex, logged: LoggedSteps) -> HeldState | None:
        """A segment at the last base that it has reached; None if its start is not complete yet."""
        bases = chain.bases_of(logged)
        own = [] if logged.parent is not None else [None]
        try:
            for member in [*reversed(bases), *own]:
                base = None if member is None else Base(member.step, open_member(self.path, chain, member))
                state = HeldState(self.path / logged.folder, base, self.part)
                if state.find_start(_BAND):
                    return state
                self.damage = self.damage or self._damage(state, logged.step)
        except IncompleteError:
            pass  # a rank has no file yet
        return None

    def _follow_list(self, state: HeldState) -> None:
        """See whether the segment has ended, and whether another one follows."""
        chain = self._read_list()
        logged = next((one for one in chain.segments if one.folder == state.tail.folder.name), None)
        is_dropped = logged is None or (logged.step is not None and logged.step < state.step)
        self._limit = None if logged is None else logged.step
        last = chain.segments[-1]
        self._has_next = last != logged
        if is_dropped or (last != logged and state.step == self._limit):
            following = self._find(chain, last)
            if following is not None:
                self._load(last, following)
                self._has_next = False
                return
            if is_dropped:
                with self._turns.writing():
                    self._state = None

    def _read_list(self) -> ChainIndex:
        self._seen = _identity(self.path / chain_file.NAME)
        chain = chain_file.read(self.path)
        if not chain.segments:
            raise NotFoundError(
                "the chain has no log of gradients", where=self.path, hint="`ckpt_recorder.Recorder` records one."
            )
        newest = max((one.step for one in chain.members), default=chain.segments[-1].first)
        self._last_base = max(self._last_base, newest)
        return chain

    def _list_changed(self) -> bool:
        return self._seen is None or self._seen != _identity(self.path / chain_file.NAME)


def _described(state: HeldState) -> tuple[Checkpoint, PartOfState | None]:
    """The state in memory as a checkpoint; of a part, with its own parameters only."""
    whole, part, layout = state.checkpoint(), state.part, state.tail.layout
    if part is None:
        return whole, None
    places = part.places(whole.parameters, layout, layout.aliases)
    rows = list(whole.parameters.items())
    own = replace(whole, parameters=dict(rows[place] for place in places))
    segment = state.tail.folder.name
    return own, PartOfState(part.number, part.count, layout.run, segment, len(rows), places)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        result = os.stat(path)
    except OSError:
        return None
    return (result.st_ino, result.st_size, result.st_mtime_ns)


def _files_nbytes(folder: Path, ranks: int) -> int:
    total = 0
    for rank in range(ranks):
        with suppress(OSError):
            total += os.stat(folder / rank_file(rank)).st_size
    return total
