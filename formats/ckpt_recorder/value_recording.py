"""The recording of tensors as they are: buffers, frozen weights, and all states that are not replayed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.universal.gradients.recorded_values import GONE, WHOLE, FlatBlock, RecordedRow
from ckpt_recorder.orders import WriteValues
from ckpt_training.composite_tensors import SEPARATOR, as_value, is_composite
from ckpt_training.engines.run import TrackedRun, content_of
from ckpt_training.local_shards import LocalPart, dtype_name, local_shard
from ckpt_training.writing.link import WriterLink


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of the run, and the row of the log that has its values."""

    row: RecordedRow
    values: torch.Tensor
    """(n,): the elements that this rank records."""


@dataclass(frozen=True)
class LiveValues:
    """What this rank records of one parameter."""

    tensors: tuple[LiveTensor, ...]
    values: dict[str, dict[str, Value]]
    """The states that are no tensors, by parameter."""


def live_tensor(name: str, role: Role, tensor: torch.Tensor) -> LiveTensor:
    """A full tensor of the model. Raises `UnsupportedError` for a dtype that no checkpoint has."""
    return _full(name, WEIGHTS, role, tensor)


def live_values(run: TrackedRun, number: int, parts: Sequence[LocalPart]) -> LiveValues:
    """All states of a tensor that an optimizer steps, with its weights. `parts`: those that this rank records.

    Raises `UnsupportedError` if a state cannot be recorded.
    """
    one = run.tensors[number]
    states = run.optimizers[one.optimizer].state.get(one.tensor, {})
    tensors: list[LiveTensor] = []
    values: dict[str, dict[str, Value]] = {}
    weights = local_shard(one.tensor).detach()
    for part in parts:
        tensors.append(_of_part(part, WEIGHTS, weights))
        if _begins(part):
            values[part.name] = {}
    for key, state in states.items():
        name = str(key)
        if isinstance(state, torch.Tensor):
            state = run.arrange(number, name, state)
        is_whole = isinstance(state, torch.Tensor) and not is_composite(local_shard(state))
        if is_whole and local_shard(state).shape == weights.shape:
            tensors += (_of_part(part, name, local_shard(state).detach()) for part in parts)
            continue
        if hasattr(one.tensor, "placements") and isinstance(state, torch.Tensor) and state.numel() > 1:
            raise UnsupportedError(
                f"the optimizer's state {name!r} of `{parts[0].name if parts else number}` has shape "
                f"{list(state.shape)}: it cannot be recorded for a tensor that is sharded",
                hint="Record an optimizer whose states have the shapes of the weights.",
            )
        for part in filter(_begins, parts):
            if is_whole:
                tensors.append(_full(part.name, name, "parameter", state))
            else:
                values[part.name][name] = _plain_state(state, f"{part.name}/{name}", tensors)
    return LiveValues(tuple(tensors), values)


def _begins(part: LocalPart) -> bool:
    """Does a part have the first element of its parameter? Its rank records what is no number for each element."""
    return part.start == 0 and not any(part.box.start)


def _of_part(part: LocalPart, state: str, values: torch.Tensor) -> LiveTensor:
    whole = part.box == Box.whole(part.shape) and part.size == part.box.size
    block = None if whole else FlatBlock(part.box, part.start, part.stop)
    row = RecordedRow(part.name, state, "parameter", _dtype(values, part.name), part.shape, block)
    return LiveTensor(row, values.reshape(-1)[part.offset : part.offset + part.size])


def _full(name: str, state: str, role: Role, tensor: torch.Tensor) -> LiveTensor:
    values = local_shard(tensor).detach()
    row = RecordedRow(name, state, role, _dtype(values, name), tuple(values.shape), None)
    return LiveTensor(row, values.reshape(-1))


def _dtype(values: torch.Tensor, name: str) -> str:
    dtype = dtype_name(values.dtype)
    if dtype not in DTYPES or values.layout is not torch.strided:
        kind = dtype if dtype not in DTYPES else str(values.layout).removeprefix("torch.")
        raise UnsupportedError(f"`{name}` is {kind}: such tensors cannot be recorded")
    return dtype


def _plain_state(state: Any, place: str, tensors: list[LiveTensor]) -> Value:
    """A state that is no tensor as a value. Tensors in it are added to `tensors`, under their places."""
    if isinstance(state, torch.Tensor) and is_composite(state):
        value = as_value(state)
        inner = {key: _plain_state(one, f"{place}{SEPARATOR}{key}", tensors) for key, one in value["tensors"].items()}
        return {**value, "tensors": inner}
    if isinstance(state, torch.Tensor):
        tensors.append(_full(place, WEIGHTS, "extra", state))
        return TensorName(place)
    if isinstance(state, dict):
        return {key: _plain_state(value, f"{place}/{key}", tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        values = [_plain_state(value, f"{place}/{i}", tensors) for i, value in enumerate(state)]
        return tuple(values) if isinstance(state, tuple) else values
    return state


class ValueRecording:
    """The tensors of a segment that this rank has recorded as they are. Only what changed is sent to the writer."""

    def __init__(self, link: WriterLink) -> None:
        self._link = link
        self._numbers: dict[RecordedRow, int] = {}
        self._digests: dict[RecordedRow, int] = {}
        self._of_state: dict[tuple[str, str], RecordedRow] = {}
        self._values: dict[str, Any] = {}
        self._extras: dict[str, Any] = {}

    def record(
        self, step: int, tensors: Sequence[LiveTensor], values: dict[str, dict[str, Value]], *, complete: bool = True
    ) -> None:
        """Record the tensors and values that changed. Raises `UnsupportedError` for a value that cannot be recorded.

        Args:
            step: The step that has them.
            tensors: Tensors of this rank.
            values: The values of parameters that are no tensors.
            complete: The tensors are all states of their parameters: others do not exist any more.
        """
        changes: list[list[int]] = []
        announced: list[Any] = []
        contents: list[bytes] = []
        for one in tensors:
            content = content_of(one.values)
            digest = xxhash.xxh3_64_intdigest(content)
            if self._digests.get(one.row) == digest:
                continue
            changes.append([self._number(one.row, announced), WHOLE])
            self._digests[one.row] = digest
            contents.append(content)
        if complete:
            changes += ([self._numbers[row], GONE] for row in self._removed(tensors))
        self._of_state |= {(one.row.name, one.row.state): one.row for one in tensors}
        new = {name: encode(value) for name, value in values.items()}
        new = {name: value for name, value in new.items() if self._values.get(name) != value}
        self._values |= new
        if changes or new:
            meta = {"values": new} if new else {}
            self._link.order(WriteValues(step, meta, announced, changes), b"".join(contents))

    def record_composite(self, step: int, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor of the model that consists of others: as an extra, which has these."""
        tensors: list[LiveTensor] = []
        value = _plain_state(tensor, name, tensors)
        self.record(step, tensors, {})
        self.record_extras(step, {name: value})

    def record_extras(self, step: int, extras: Mapping[str, Value]) -> None:
        """Record values that belong to no parameter, by name, as far as they changed."""
        new = {name: encode(value) for name, value in extras.items()}
        new = {name: value for name, value in new.items() if self._extras.get(name) != value}
        if new:
            self._extras |= new
            self._link.order(WriteValues(step, {"extras": new}, [], []))

    def _number(self, row: RecordedRow, announced: list[Any]) -> int:
        if row not in self._numbers:
            self._numbers[row] = len(self._numbers)
            announced.append(row.to_json())
        return self._numbers[row]

    def _removed(self, tensors: Sequence[LiveTensor]) -> Iterator[RecordedRow]:
        """The rows of the parameters of these tensors that do not exist any more, or not with this shape."""
        names = {one.row.name for one in tensors}
        rows = {one.row for one in tensors}
        replaced = {(one.row.name, one.row.state) for one in tensors}
        for key, row in list(self._of_state.items()):
            if row.name in names and row not in rows:
                self._digests.pop(row, None)
                if key not in replaced:
                    del self._of_state[key]
                    yield row
