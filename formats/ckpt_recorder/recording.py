"""The recording of one segment by one rank: it copies values into the ring and sends orders to its writer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from ckpt_codecs.base import Array
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.layout import (
    LoggedOptimizer,
    LoggedTensor,
    RankLayout,
    SegmentLayout,
    VectorPart,
)
from ckpt_formats.universal.gradients.random_states import GeneratorState
from ckpt_formats.universal.gradients.record import Kind, with_one_nan
from ckpt_recorder.holders import RankPart
from ckpt_recorder.orders import Flush, FlushEvery, SegmentFollows, WriteRandomStates, WriteRecord
from ckpt_recorder.probe import ProbeResult
from ckpt_recorder.value_recording import ValueRecording, live_tensor, live_values
from ckpt_recorder.writer import WriterSettings
from ckpt_training.composite_tensors import SEPARATOR, is_composite
from ckpt_training.engines.run import (
    TrackedRun,
    count_of,
    frozen_tensors,
    full_tensor,
    local_gradient,
    state_names,
    state_of,
)
from ckpt_training.group_options import group_options
from ckpt_training.writing.link import WriterBroken, WriterLink
from ckpt_training.writing.ring import Ring

WRITER = "ckpt_recorder.writer"
"""The module that the writer process runs."""


def draft_layout(
    probed: Sequence[ProbeResult], shares: Sequence[RankPart], name: str, first: int, codec: str
) -> SegmentLayout:
    """The layout of a segment from the contributions of all ranks. The chain later decides its `parent`."""
    tensors: dict[str, LoggedTensor] = {}
    numbers: dict[str, int] = {}
    layouts = []
    whole = frozenset(number for number, one in enumerate(probed) if one.threads is not None)
    for share in shares:
        for vector, part, _ in share.parts:
            is_replayed = share.vectors[vector].optimizer not in share.updated
            stepped = share.dtypes[vector] if is_replayed else "float32"
            tensors.setdefault(part.name, LoggedTensor(part.name, part.dtype, part.shape, stepped))
            numbers.setdefault(part.name, len(numbers))
        rows = [
            VectorPart(numbers[part.name], vector, part.start, part.stop, vectorized, part.box)
            for vector, part, vectorized in share.replayed
        ]
        layouts.append(RankLayout(share.vectors, tuple(rows), whole))
    optimizers = tuple(
        LoggedOptimizer(one.type, one.method, one.exactness, one.figures, groups, one.threads)
        for one, groups in zip(probed, _merged_groups(shares), strict=True)
    )
    aliases = {alias: name for share in shares for alias, name in share.aliases.items()}
    versions = {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}
    return SegmentLayout(
        name, first, codec, tuple(tensors.values()), optimizers, tuple(layouts), aliases, versions, None
    )


def _merged_groups(shares: Sequence[RankPart]) -> list[tuple[tuple[str, ...], ...]]:
    """The names of all ranks' parameters, by optimizer and group. Ranks may have different parameters in a group."""
    return [
        tuple(
            tuple(dict.fromkeys(name for share in shares for name in share.groups[number][group]))
            for group in range(len(groups))
        )
        for number, groups in enumerate(shares[0].groups)
    ]


class RankRecording:
    """A segment that this rank is recording. Methods raise `WriterBroken` after the writer has failed."""

    def __init__(
        self,
        run: TrackedRun,
        share: RankPart,
        layout: RankLayout,
        settings: WriterSettings,
        stall_seconds: float,
    ) -> None:
        self._run, self._layout, self._share = run, layout, share
        self._numbers = {id(one.tensor): number for number, one in enumerate(run.tensors)}
        self._places: list[list[tuple[int, int, int]]] = [[] for _ in run.tensors]
        """For each tensor, the start of each part in the rank's vector and in the tensor, and its size."""
        self._part_offsets = []
        for start, (number, part, _) in zip(layout.starts, share.replayed, strict=False):
            self._places[number].append((start, part.offset, part.size))
            self._part_offsets.append((number, part.offset))
        self._chunks = [frozenset(self._chunks_of(number)) for number in range(len(run.tensors))]
        self._of_optimizer = [
            [n for n, one in enumerate(run.tensors) if one.optimizer == number] for number in range(len(run.optimizers))
        ]
        self._changed_by = [run.changed_by(number) for number in range(len(run.optimizers))]
        self._powers = {n: _BetaPowers(run, n) for n, one in enumerate(run.optimizers) if _has_beta_powers(one)}
        self._powers_from: dict[int, int] = {}
        self._logged_groups: list[Any] = [None for _ in run.optimizers]
        self._ring = Ring(settings.slot_nbytes, settings.slots)
        self._slots = [
            torch.from_numpy(self._ring.slot(i)[: layout.size * 4].view(np.float32)) for i in range(settings.slots)
        ]
        self._link = WriterLink(settings, self._ring, stall_seconds, WRITER)
        self._values = ValueRecording(self._link)

    @property
    def writer_pid(self) -> int:
        return self._link.pid

    @property
    def peers(self) -> dict[str, str]:
        """Of each host that should hold the log, the last that was said of it."""
        return self._link.peers

    def close(self) -> str | None:
        """End the writer. Returns why something was not written; None if everything was written."""
        self._link.close()
        return self._link.reason

    def tensors_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """The numbers of the tensors that the next call of an optimizer steps."""
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        return frozenset(self._numbers[id(one)] for one in parameters if id(one) in self._numbers)

    @property
    def waited(self) -> float:
        """Seconds for which training has waited for the writer."""
        return self._link.waited

    def set_flush_steps(self, steps: int) -> None:
        """Flush the log after so many steps from now on."""
        self._link.order(FlushEvery(steps))

    def announce_next(self) -> None:
        """State that another segment follows at once."""
        self._link.order(SegmentFollows())

    def wait_until_flushed(self) -> None:
        """Wait until all recorded values are on the disk."""
        self._link.await_answer(Flush())

    def record_start(self, step: int) -> None:
        """Record all states at the start of the segment that are replayed from there."""
        for name in self._state_names():
            self._record_state(step, name, {"state": name}, None)

    def record_set(self, step: int, place: Literal["before", "after"], name: str, numbers: Iterable[int]) -> None:
        """Record a state of some tensors, which the run set outside its optimizers.

        `place`: whether it set them before or after the gradients of that step were applied.
        """
        chunks = sorted(frozenset[int]().union(*(self._chunks[number] for number in numbers)))
        if chunks:
            self._record_state(step, name, {"state": name, "set": place}, chunks)

    def _record_state(self, step: int, name: str, meta: Mapping[str, Any], chunks: list[int] | None) -> None:
        slot = self._link.acquire_slot()
        for number, places in enumerate(self._places):
            values = state_of(self._run, number, name) if places else None
            for start, offset, size in places:
                target = self._slots[slot][start : start + size]
                if values is None:
                    target.zero_()
                else:
                    target.copy_(values[offset : offset + size])
        self._link.order(WriteRecord(Kind.STATE, step, meta, slot, chunks))

    def _state_names(self) -> list[str]:
        """The names of the states that are replayed; none if no optimizer's steps are."""
        replayed = [number for number, places in enumerate(self._places) if places]
        return state_names(self._run, replayed) if replayed else []

    def is_replayed(self, number: int) -> bool:
        """Are the steps of a tensor replayed? `number`: its place in the run."""
        return self._run.tensors[number].optimizer not in self._share.updated

    def record_update(self, step: int, number: int) -> None:
        """Record all states of the tensors of an optimizer, as far as they changed."""
        self.record_live(step, self._changed_by[number])

    def record_live(self, step: int, numbers: Iterable[int]) -> None:
        """Record all states of tensors that optimizers step, as far as they changed. `numbers`: of the run."""
        for number in numbers:
            parts = self._share.own_parts(number)
            if parts:
                live = live_values(self._run, number, parts)
                self._values.record(step, live.tensors, live.values)

    def record_gradients(self, step: int, number: int, call: tuple[int, int]) -> None:
        """Record the gradients before one call of an optimizer. `call`: its number, and the calls in a step."""
        optimizer = self._run.optimizers[number]
        slot = self._link.acquire_slot()
        vectors = self._copy_gradients(optimizer, self._slots[slot])
        if number in self._powers:
            self._powers_from[number] = self._powers[number].since(vectors)
        meta: dict[str, Any] = {"groups": self._groups_of(number)}
        self._logged_groups[number] = meta["groups"]
        chunks = None
        if number:
            meta["optimizer"] = number
        if vectors != self._of_optimizer[number]:
            meta["vectors"] = vectors
        if len(vectors) < len(self._run.tensors):
            chunks = sorted(frozenset().union(*(self._chunks[vector] for vector in vectors)))
        if call[1] > 1:
            meta["part"] = list(call)
        self._link.order(WriteRecord(Kind.GRADIENTS, step, meta, slot, chunks))

    def record_random_states(self, step: int, states: Mapping[str, GeneratorState]) -> None:
        """Record states of random number generators, by generator."""
        if states:
            generators = [(name, one.words.size, one.fields) for name, one in states.items()]
            content = b"".join(one.words.tobytes() for one in states.values())
            self._link.order(WriteRandomStates(step, generators), content)

    def record_nothing(self, step: int, number: int = 0, call: tuple[int, int] = (0, 1)) -> None:
        """Record a call of an optimizer whose gradients are not in the log: it did nothing, or its states are."""
        meta: dict[str, Any] = {"groups": self._groups_of(number), "vectors": []}
        self._logged_groups[number] = meta["groups"]
        if number:
            meta["optimizer"] = number
        if call[1] > 1:
            meta["part"] = list(call)
        self._link.order(WriteRecord(Kind.GRADIENTS, step, meta))

    def record_skipped(self, step: int, number: int) -> None:
        """Record a step that the optimizer skips."""
        self._link.order(WriteRecord(Kind.SKIPPED, step, {"optimizer": number}))

    def record_notes(self, step: int, notes: Mapping[str, Any]) -> None:
        """Record notes of a step, values that `typed_json` can encode."""
        self._link.order(WriteRecord(Kind.NOTES, step, {"notes": encode(dict(notes))}))

    def record_doubt(self, first: int, last: int, names: Sequence[str]) -> None:
        """Record that some tensors may have other values from one step to another."""
        self._link.order(WriteRecord(Kind.NOTES, last + 1, {"doubt": [first, last, list(names)]}))

    def record_options(self, step: int) -> None:
        """Record the options of all groups if they changed since a step: a schedule has set those of the next one."""
        groups = self._groups()
        if groups != self._logged_groups:
            self._logged_groups = groups
            self._link.order(WriteRecord(Kind.NOTES, step, {"groups": groups}))

    def has_logged_options(self, number: int) -> bool:
        """Have the groups of an optimizer the options that were last recorded?"""
        return bool(self._groups_of(number) == self._logged_groups[number])

    def record_frozen(self, step: int) -> None:
        """Record parameters that no optimizer steps. Their ranks gather each, and one of them records it."""
        broken = None
        for name, tensor in frozen_tensors(self._run):
            gathered = full_tensor(tensor)
            if name in self._share.frozen and broken is None:
                try:
                    if is_composite(gathered):
                        self._values.record_composite(step, name, gathered)
                    else:
                        self._values.record(step, [live_tensor(name, "frozen", gathered)], {})
                except WriterBroken as error:
                    broken = error  # the other ranks still need this rank to gather
        if broken is not None:
            raise broken

    def record_extra_states(self, step: int, states: Mapping[str, Value]) -> None:
        """Record the values that modules add to the state dict, by name, as far as they changed."""
        self._values.record_extras(step, states)

    def record_tensors(self, step: int, role: Role, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record buffers or frozen tensors that have changed, by name, as far as this rank records them.

        Those of which a frozen one consists have the role `extra`.
        """
        own = self._share.buffers if role == "buffer" else self._share.frozen
        owners = {name: name.partition(SEPARATOR)[0] if role == "extra" else name for name in tensors}
        live = [live_tensor(name, role, tensor) for name, tensor in tensors.items() if owners[name] in own]
        self._values.record(step, live, {})

    def _groups(self) -> list[Any]:
        """The current options of all groups of all optimizers."""
        return [self._groups_of(number) for number in range(len(self._run.optimizers))]

    def options_of(self, number: int) -> list[dict[str, Value]]:
        """The options that the groups of an optimizer have now, as they are recorded."""
        optimizer = self._run.optimizers[number]
        powers = {"powers_from": self._powers_from[number]} if number in self._powers_from else {}
        return [group_options(optimizer, group) | powers for group in self._run.groups_of(number)]

    def _groups_of(self, number: int) -> Any:
        return encode(self.options_of(number))

    def record_fingerprint(self, step: int, proof: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Record the hash of each chunk of each state. `proof`: what is known of the steps before."""
        digests = {}
        replayed = [number for number, places in enumerate(self._places) if places]
        for name in self._state_names():
            arrays = {number: _array(state_of(self._run, number, name)) for number in replayed}
            if all(array is not None for array in arrays.values()):
                digests[name] = list(self._digests(arrays))
        self._link.order(WriteRecord(Kind.FINGERPRINT, step, {"digests": digests, "nan": "one", **proof}))

    def record_end(self, step: int, proof: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Record the end of the log. `proof`: what is known of its steps."""
        self._link.order(WriteRecord(Kind.END, step, dict(proof)))

    def _digests(self, arrays: Mapping[int, Array | None]) -> Iterator[int]:
        places = dict(zip(map(id, self._layout.parts), self._part_offsets, strict=True))
        for index in range(self._layout.chunk_count):
            digest = xxhash.xxh3_64()
            for one in self._layout.ranges(index):
                number, offset = places[id(one.part)]
                array = arrays[number]
                assert array is not None
                digest.update(with_one_nan(array[offset + one.start : offset + one.stop]).data)
            yield digest.intdigest()

    def _chunks_of(self, number: int) -> Iterator[int]:
        for start, _, size in self._places[number]:
            if size:
                yield from range(self._layout.chunk_of(start), self._layout.chunk_of(start + size - 1) + 1)

    def _copy_gradients(self, optimizer: torch.optim.Optimizer, out: torch.Tensor) -> list[int]:
        """Copy this rank's gradients to `out`, (n,) float32, with zeros for missing ones.

        Returns the numbers of the tensors that have a gradient.
        """
        scale = getattr(optimizer, "grad_scale", None)
        vectors, targets, sources = [], [], []
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            number = self._numbers.get(id(parameter))
            if number is None:
                raise WriterBroken("the optimizer steps a tensor that it did not have when the segment began")
            if parameter.grad is None:
                continue
            vectors.append(number)
            if not self._places[number]:
                continue
            gradient = local_gradient(parameter)
            if gradient is None:
                raise WriterBroken("a gradient is split over the ranks in another way than its parameter")
            flat = gradient.reshape(-1)
            for start, offset, size in self._places[number]:
                targets.append(out[start : start + size])
                sources.append(flat[offset : offset + size])
        if len(vectors) < len(self._run.tensors):
            present = frozenset(vectors)
            for number, places in enumerate(self._places):
                if number not in present:
                    for start, _, size in places:
                        out[start : start + size].zero_()
        if scale is not None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source / scale.to(source.device))
        elif targets:
            torch._foreach_copy_(targets, sources)
        return sorted(vectors)


def _array(values: torch.Tensor | None) -> Array | None:
    """The values as float32, on the CPU."""
    return None if values is None else values.float().contiguous().cpu().numpy()


def _has_beta_powers(optimizer: torch.optim.Optimizer) -> bool:
    """Is it DeepSpeed's Adam for CPUs?"""
    return type(optimizer).__name__ == "DeepSpeedCPUAdam"


class _BetaPowers:
    """Tracks the step at which DeepSpeed's Adam for CPUs last computed the powers of its betas with `pow`.

    At consecutive steps its operator multiplies the powers by the betas. At any other step, for example after it loads
    a checkpoint, it computes them with `pow`, whose last bits differ. (DeepSpeed 0.19, `csrc/includes/cpu_adam.h`,
    IncrementStep.)
    """

    def __init__(self, run: TrackedRun, number: int) -> None:
        """`number`: the index of the optimizer."""
        self._run, self._number = run, number
        counts = (count_of(run, n) for n, one in enumerate(run.tensors) if one.optimizer == number)
        self._count = -1 if run.was_loaded else max(counts, default=0)
        self._betas = self._betas_now()
        self._since = 0

    def since(self, tensors: Sequence[int]) -> int:
        """That step, for the next call of the optimizer, which steps the given tensors."""
        count = 1 + max((count_of(self._run, number) for number in tensors), default=0)
        betas = self._betas_now()
        if betas != self._betas or count not in (self._count, self._count + 1):
            self._since = count
        self._count, self._betas = count, betas
        return self._since

    def _betas_now(self) -> list[object]:
        return [group["betas"] for group in self._run.groups_of(self._number)]
