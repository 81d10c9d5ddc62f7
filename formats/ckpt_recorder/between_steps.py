"""What the run changes between two steps of its optimizers, and to which of the two steps each change belongs."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.text import list_names
from ckpt_recorder.recording import RankRecording
from ckpt_recorder.watch import StateWatch
from ckpt_recorder.watched_tensors import WatchedState, WatchedTensor, WatchedTensors
from ckpt_training.engines.run import TrackedRun, as_saved, further_entries
from ckpt_training.plain_notes import OPTIMIZER_ENTRIES, plain_note

_LOG = logging.getLogger("ckpt_recorder")

Moment = Literal["forward", "note", "step"]
"""When the recorder looks: before a forward pass; as the run takes a note, or ends; before a step."""
Place = Literal["before", "after"]
"""Does a change belong to the step before which it was found, or to the one after which it was found?"""


class BetweenSteps:
    """Records what the run changes outside the steps of its optimizers.

    What it changes before the last forward pass in training mode belongs to the step before, what it changes later to
    the next step; of buffers, before the first forward pass, because these passes change them.

    Attributes:
        in_iteration: Has the forward pass of the next step begun?
        has_seen_pass: Has any forward pass with gradients begun since the last step?
        is_known: Can the log go on from the last step: has the optimizer the states that a replay gives?
        is_ahead: Did the run change states that are replayed since the next step began?
    """

    _run: TrackedRun
    _watched: WatchedTensors

    def __init__(self, record: Callable[..., None]) -> None:
        """`record`: calls a method of the recording of the current segment with arguments, if the recording works."""
        self.in_iteration = self.has_seen_pass = self.is_ahead = False
        self.is_known = True
        self._record = record
        self._watch = StateWatch[WatchedState | WatchedTensor]()
        self._noted_in_iteration = False
        """Was a note taken since? Another forward pass then begins the next step again."""
        self._has_entries = False
        """Have the optimizers ever had entries in their state dicts that belong to no parameter?"""
        self._logged: set[str] = set()
        """The names of the tensors that were logged as changed outside the optimizers."""

    def begin(self, run: TrackedRun) -> None:
        """A segment begins: with this run, in its current state."""
        self._run = run
        self._watched = WatchedTensors(run)
        self.is_known = True

    @property
    def is_complete(self) -> bool:
        """Are all values compared, and not only some of a large model?"""
        return self._watch.is_complete

    @property
    def has_same_modules(self) -> bool:
        """Has the model the modules, parameters and buffers with which the segment began?"""
        return self._watched.is_complete

    def run_ends(self) -> None:
        """No step follows. If a note was taken after the last passes, they belong to the last step."""
        if self._noted_in_iteration:
            self.step_done()

    def step_done(self) -> None:
        """A step is complete."""
        self.in_iteration = self._noted_in_iteration = self.has_seen_pass = False

    @torch.no_grad()
    def refresh(self, recording: RankRecording, last: int, *, complete: bool) -> None:
        """Take what all tensors are now as what they should be before the next step.

        Also record what the run changed earlier in tensors that no optimizer steps, and that was not found then.

        Args:
            recording: The current segment.
            last: The number of the last step.
            complete: Compare all values.
        """
        tensors = self._watched.now()
        # No fingerprint covers what is recorded as it is.
        updated = {one for one in tensors if isinstance(one, WatchedState) and not recording.is_replayed(one.number)}
        self._watch.refresh(tensors, complete=complete, always=updated)
        earlier = self._watch.changed_earlier(self._watched.others(), last)
        for one in (one for one in earlier if isinstance(one, WatchedTensor)):
            content = {one.name: as_saved(self._run, one.name, tensors[one])}
            self._record(RankRecording.record_tensors, step=last, role=one.role, tensors=content)
        doubtful = {one: moment for one, moment in earlier.items() if moment < last}  # not where a segment begins
        if doubtful:
            first, names = min(doubtful.values()), [one.name for one in doubtful]
            self._record(RankRecording.record_doubt, first, last - 1, names)
            _LOG.warning(
                "steps %d to %d are in doubt: %s was changed in a way that torch does not count (NumPy, `tensor.data`)",
                first,
                last - 1,
                list_names(names),
            )

    @torch.no_grad()
    def pass_begins(self, *, is_training: bool) -> bool:
        """A forward pass begins. Returns whether the next step may begin with it. `is_training`: it changes buffers."""
        is_first, self.has_seen_pass = not self.has_seen_pass, True
        if (self.in_iteration and not self._noted_in_iteration) or not (is_training or is_first):
            self._watch.mark(self._watched.states() | self._watched.frozen)
            return False
        self.in_iteration = self._noted_in_iteration = False
        return True

    @torch.no_grad()
    def record_changes(self, recording: RankRecording, last: int, moment: Moment) -> bool:
        """Record what was changed since the last look. `last`: the number of the last step.

        Returns False if the log cannot go on from it, because the optimizer has other states now.
        """
        is_noted, is_unseen = moment == "note", moment == "step" and not self.has_seen_pass
        self._noted_in_iteration |= is_noted and self.in_iteration
        tensors = self._watched.now()
        changed, removed = self._watch.changed(tensors), self._watch.removed(tensors)
        if is_noted and self.in_iteration:
            # If no step follows these passes, a gradient scaler has skipped it, and they belong to the last step.
            changed = [one for one in changed if not (isinstance(one, WatchedTensor) and one.role == "buffer")]
        else:
            self.record_extra_states(last + (self.in_iteration or is_unseen))
        is_next = self.in_iteration or (moment == "step" and self.has_seen_pass)
        place: Place = "before" if is_next and not is_noted else "after"
        if not changed and not removed:
            return self.is_known
        sets: dict[tuple[Place, str], list[int]] = {}
        live: dict[Place, set[int]] = {}
        others: dict[tuple[Place, Role], dict[str, torch.Tensor]] = {}
        for one in changed:
            at: Place = "after" if self._watch.is_as_marked(one, tensors[one]) else place
            if isinstance(one, WatchedTensor):
                if one.role == "buffer":  # if no forward pass was seen, it counts as changed by one
                    at = "before" if self.in_iteration or is_unseen else "after"
                others.setdefault((at, one.role), {})[one.name] = as_saved(self._run, one.name, tensors[one])
            elif recording.is_replayed(one.number):
                has_dtype = tensors[one].dtype == self._run.tensors[one.number].tensor.dtype
                self.is_known &= has_dtype and one.name != "step"
                sets.setdefault((at, one.name), []).append(one.number)
            else:
                live.setdefault(at, set()).add(one.number)
        unknown = [one.number for one in removed if isinstance(one, WatchedState)]
        self.is_known &= not any(map(recording.is_replayed, unknown))
        if not self.is_known:
            unknown += (number for numbers in sets.values() for number in numbers)
            sets.clear()
        if unknown:
            live.setdefault(place, set()).update(unknown)
        for (at, name), numbers in sets.items():
            self.is_ahead |= at == "before"
            step = last + (at == "before")
            self._record(RankRecording.record_set, step=step, place=at, name=name, numbers=numbers)
        for at, updated in live.items():
            step = last + (at == "before")
            self._record(RankRecording.record_live, step=step, numbers=sorted(updated))
        for (at, role), of_role in others.items():
            step = last + (at == "before")
            self._record(RankRecording.record_tensors, step=step, role=role, tensors=of_role)
        self._watch.refresh_some({one: tensors[one] for one in changed})
        self._log_changed([*changed, *removed])
        return self.is_known

    def record_others(self, step: int) -> None:
        """Record the tensors that no optimizer steps and that changed during a step: by a closure, for example."""
        # The optimizer has just changed the others, as it should.
        tensors = self._watched.others()
        for one in self._watch.changed(tensors):
            if isinstance(one, WatchedTensor):
                changed = {one.name: tensors[one]}
                self._record(RankRecording.record_tensors, step=step, role=one.role, tensors=changed)

    def record_extra_states(self, step: int) -> None:
        """Record what modules and optimizers add to their state dicts, if it changed."""
        states = {name: plain_note(module.get_extra_state()) for name, module in self._watched.with_extra_states}
        if (entries := further_entries(self._run)) or self._has_entries:
            self._has_entries = True
            states[OPTIMIZER_ENTRIES] = plain_note(entries)
        if states:
            self._record(RankRecording.record_extra_states, step, states)

    def _log_changed(self, changed: Iterable[Any]) -> None:
        """Log once of each tensor that the run changes it outside its optimizers."""
        names = {one.name_in(self._run) for one in changed if isinstance(one, WatchedState)}
        new = sorted(names - self._logged)
        if new:
            self._logged |= names
            _LOG.info("%s: changed outside the optimizer, between steps: recorded", list_names(new))
