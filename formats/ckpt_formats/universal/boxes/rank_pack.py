"""Write the boxes of one rank of a live job into a pack of its own. Needs neither torch nor other ranks.

    plain       values go into the pack as they come
    otherwise   values go into a local file as they come; when all states of a box are there, the box is encoded

The rank of a job calls `add` for runs of values, then `finish`. The receipt goes to the process that assembles the
checkpoint. The local values serve the next save: its deltas are against them, so that nothing is read back or kept.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np

from ckpt_codecs.base import Bytes
from ckpt_codecs.delta import DeltaCodec, StepInfo
from ckpt_codecs.registry import DEFAULT_DELTA, delta_from_config, parse_delta
from ckpt_formats.core.checkpoint import Parameter, Role
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.encoding import AUTO, EncodingOptions
from ckpt_formats.core.errors import CkptError, InvalidArgumentError
from ckpt_formats.core.files import Reader, write_at
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.own_folder import create_own
from ckpt_formats.core.publish import flush
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.boxes.receipt import PackReceipt
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.checked import KnownBlob, KnownTensor
from ckpt_formats.universal.chunked import ChunkDigests
from ckpt_formats.universal.delta_plan import DeltaBase, with_codec
from ckpt_formats.universal.entry import ALIGNMENT, Extent, ParameterEntry, StateEntry
from ckpt_formats.universal.index import index_of
from ckpt_formats.universal.manifest import pack_file
from ckpt_formats.universal.pack import StatesWriter, finish_pack, header_nbytes
from ckpt_formats.universal.pack_file import Mark, PackFile

_FITTED_NBYTES = 1 << 18
"""Bytes of a box from which a fit is used for others, too."""
_LIKE = 0.7, 1.15
"""How much smaller and larger a delta may be than that of the box to which its codec was fitted."""


@dataclass(frozen=True)
class RankBox:
    """Elements of some states of a parameter that one rank saves: a block, or a range of its elements in C order.

    States of one parameter with the same elements belong in one box: they are encoded together.
    """

    parameter: str
    """The name in the full model."""
    role: Role
    shape: Shape
    """That of the full tensor of each of these states."""
    block: Box
    states: Mapping[str, str]
    """The states (`master`, `model`, `exp_avg`, ...) and their dtypes by NumPy's names (`float32`, `bfloat16`)."""
    start: int = 0
    """The first element of the range, counted in the block in C order."""
    stop: int | None = None
    """The element after the last; None: the box has all of the block."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgumentError` for a box that is not within its tensor, or has no states."""
        rank = len(self.shape)
        is_inside = len(self.block.start) == len(self.block.stop) == rank and all(
            0 <= low <= high <= length
            for low, high, length in zip(self.block.start, self.block.stop, self.shape, strict=True)
        )
        in_range = is_inside and 0 <= self.start <= self._stop <= self.block.size
        if not in_range or not self.states or not set(self.states.values()) <= DTYPES.keys():
            raise InvalidArgumentError(f"no box of `{printable(self.parameter)}`: {self}")

    @property
    def _stop(self) -> int:
        return self.block.size if self.stop is None else self.stop

    @property
    def place(self) -> BoxPlace:
        """Where its elements are in the full tensor."""
        is_block = (self.start, self._stop) == (0, self.block.size)
        own = self.block.shape if is_block else (self._stop - self.start,)
        return BoxPlace(self.shape, self.block, self.start, own)

    def name(self, number: int) -> str:
        """Its name in the pack of a rank. It is for people."""
        place = self.place
        part = "" if place.own == self.block.shape else f"[{self.start}:{self._stop}]"
        return f"{self.parameter}{self.block}{part}@{number}"


@dataclass(frozen=True)
class RankValues:
    """The plain values of all boxes of a rank at one save, in a local file."""

    path: Path
    places: Mapping[tuple[str, BoxPlace], Mapping[str, tuple[int, StateEntry]]]
    """Of each box, by parameter and place: where each state begins in the file, and its checksums."""

    def at(self, path: Path) -> "RankValues":
        """The same values after their file was moved."""
        return replace(self, path=path)

    def before(self, box: RankBox) -> Parameter | None:
        """The states of a box, each chunk compared with its checksum as it is read; None if they are not there."""
        known = self.places.get((box.parameter, box.place), {})
        states = dict[str, Tensor]()
        for state, (offset, entry) in known.items():
            plain = Tensor.of(FileBlob.packed(self.path, offset, entry.shape, DTYPES[entry.dtype]))
            tensor = KnownTensor(plain, entry.digests, box.parameter, state, str(self.path))
            states[state] = Tensor.of(KnownBlob.whole(tensor))
        return Parameter(box.parameter, box.role, states) if states else None


@dataclass
class _OpenState:
    """A state of a box, as far as it was given."""

    tensor: Tensor
    offset: int
    """Where it begins in the file of values."""
    digests: ChunkDigests | None
    received: int = 0

    @property
    def is_complete(self) -> bool:
        return self.received == self.tensor.nbytes


@dataclass
class _OpenBox:
    box: RankBox
    parameter: Parameter
    states: dict[str, _OpenState] = field(default_factory=dict)
    is_written: bool = False


class RankPack:
    """The pack of one rank while it is written."""

    def __init__(
        self,
        folder: Path,
        number: int,
        boxes: Sequence[RankBox],
        *,
        save: str,
        codec: str | None = None,
        values: Path | None = None,
        earlier: RankValues | None = None,
        steps: Mapping[str, StepInfo] | None = None,
        check: bool = True,
    ) -> None:
        """Begin the pack `number` (the rank, from 0 on) of the checkpoint that is built in `folder`.

        Args:
            folder: Of the checkpoint. Every rank may create it.
            number: The rank. Together, ranks have all numbers from 0 on.
            boxes: All that the rank saves.
            save: A text that all ranks have in this save, and no other save has.
            codec: `auto`, or the text of a lossless codec; None: values are stored plain.
            values: A local file that gets the values. It may be left out if `codec` and `earlier` are.
            earlier: The values of this rank at the save before: boxes that it has are stored as deltas.
            steps: What is known of the optimizer's steps since then, by the name of a parameter.
            check: Decode what was encoded, and compare.

        Raises `InvalidArgumentError` for two boxes of a rank with the same elements of a state, or if `values` is
        missing; `OutputError` if a file cannot be created.
        """
        if values is None and (codec is not None or earlier is not None):
            raise InvalidArgumentError("a pack with a codec, or with deltas, needs a local file for its values")
        self.notes: list[str] = []
        """What was stored in another way than was asked for."""
        self._number = number
        self._save = save
        self._path = folder / pack_file(number)
        self._earlier = earlier
        self._steps = steps or {}
        self._coding = _options(codec, earlier, check)
        self._codec = parse_delta(DEFAULT_DELTA)
        self._fits = dict[str, _BoxFit]()
        self._values = self._path if values is None else values
        own = [_parameter(box, box.name(number), self._values) for box in boxes]
        _check_distinct(boxes, own)
        self._is_plain = values is None
        with ExitStack() as stack:
            with _written(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._out = stack.enter_context(PackFile(self._path, number, header_nbytes(own, self._coding, {})))
            at = self._out.header_nbytes if values is None else 0
            self._boxes, end = _placed(boxes, own, self._values, at, self._is_plain)
            if values is None:
                self._out.reserve(end - at)
            else:
                with _written(values):
                    self._file = create_own(values)
                stack.callback(os.close, self._file)
                self._transfer = stack.enter_context(Transfer(stack.enter_context(Reader(check=False))))
                self._writer = StatesWriter(self._out, self._transfer, self._coding)
            self._stack = stack.pop_all()
        self._entries: dict[str, ParameterEntry] = {}

    def __enter__(self) -> "RankPack":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def add(self, box: int, state: str, offset: int, data: Bytes) -> None:
        """Add the bytes of a state of the box with this number, from byte `offset` of the state on.

        Boxes and states may come in any order; the bytes of one state come front to back. Values are little-endian, in
        C order. Raises `InvalidArgumentError` for bytes that are not the next ones of a state, `OutputError` if they
        cannot be written.
        """
        opened = self._boxes[box]
        own = opened.states.get(state)
        view = memoryview(data).cast("B")
        if own is None or offset != own.received or offset + len(view) > own.tensor.nbytes:
            raise InvalidArgumentError(
                f"box {box}: bytes {offset} to {offset + len(view)} are not the next ones of `{printable(state)}`"
            )
        with _written(self._path if self._is_plain else self._values):
            if self._is_plain:
                self._out.write_at(view, own.offset + offset)
                assert own.digests is not None
                own.digests.add(np.frombuffer(view, np.uint8))
            else:
                write_at(self._file, view, own.offset + offset)
        own.received += len(view)
        if not self._is_plain and not opened.is_written and all(one.is_complete for one in opened.states.values()):
            with _written(self._path):
                self._encode(opened)

    def finish(self) -> PackReceipt:
        """Write what is left and the header, and flush the pack to the disk. Returns what the index needs.

        Raises `InvalidArgumentError` if bytes of a state were not added, `OutputError` if they cannot be written.
        """
        with _written(self._path):
            return self._finish()

    def _finish(self) -> PackReceipt:
        for opened in self._boxes:
            lacking = next((state for state, own in opened.states.items() if not own.is_complete), None)
            if lacking is not None:
                raise InvalidArgumentError(f"{opened.parameter.name}: bytes of `{printable(lacking)}` were not added")
            if not self._is_plain and not opened.is_written:
                self._encode(opened)  # one without elements
        if self._is_plain:
            entries = tuple(_plain_entry(opened, self._number) for opened in self._boxes)
        else:
            entries = self._writer.finish({})
        written = finish_pack(self._out, entries)
        self._entries = {entry.name: entry for entry in entries}
        self._stack.close()
        flush(self._path)
        in_order = [self._entries[opened.parameter.name] for opened in self._boxes]
        places = tuple((opened.box.parameter, opened.box.place) for opened in self._boxes)
        return PackReceipt(self._save, self._number, written.pack, places, index_of(in_order))

    @property
    def rank_values(self) -> RankValues:
        """The values for the deltas of the next save. They are there after `finish`."""
        places = {
            (opened.box.parameter, opened.box.place): {
                state: (own.offset, self._entries[opened.parameter.name].states[state])
                for state, own in opened.states.items()
            }
            for opened in self._boxes
        }
        return RankValues(self._values, places)

    def _encode(self, opened: _OpenBox) -> None:
        """Write a box of which all values are there: as a delta where that is possible and smaller."""
        opened.is_written = True
        before = None if self._earlier is None else self._earlier.before(opened.box)
        if before is None:
            self._writer.add(opened.parameter)
            return
        mark = self._out.mark()
        step = self._steps.get(opened.box.parameter, StepInfo())
        try:
            self._write_delta(opened.parameter, before, step)
        except CkptError as error:
            assert self._earlier is not None
            if error.where is None or str(self._earlier.path) not in error.where:
                raise
            self.notes.append(f"{opened.parameter.name} is stored without a delta: {error.what}")
            self._out.rollback(mark)
            self._writer.add(opened.parameter)

    def _write_delta(self, parameter: Parameter, before: Parameter, step: StepInfo) -> None:
        """Write a box as a delta, with the codec that was fitted to a box of the same step, if that does as well.

        Small boxes would take four times as long if each had a fit, and a comparison with other codecs.
        """
        key = str((step, {state: tensor.dtype.name for state, tensor in parameter.states.items()}))
        mark, known = self._out.mark(), self._fits.get(key)
        if known is not None:
            base = DeltaBase(before, known.codec, step)
            plan = with_codec(parameter, base, self._transfer)
            if plan is not None:
                delta = self._writer.add(parameter, base, plan=plan)
                if delta is not None and known.is_like(self._share_since(mark, parameter)):
                    return
                self._writer.undo(mark)
        delta = self._writer.add(parameter, DeltaBase(before, self._codec, step))
        if delta is not None and parameter.nbytes >= _FITTED_NBYTES:
            share = self._share_since(mark, parameter)
            self._fits[key] = _BoxFit(delta_from_config(dict(delta.codec)), share)

    def _share_since(self, mark: Mark, parameter: Parameter) -> float:
        """Bytes that were written since a mark, for each byte of a parameter."""
        return (self._out.position - mark.position) / parameter.nbytes


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Raise `OutputError` for what the system refuses to write at a path."""
    try:
        yield
    except OSError as error:
        raise unwritable(error, path) from error


@dataclass(frozen=True)
class _BoxFit:
    """A delta codec that was fitted to a box."""

    codec: DeltaCodec
    share: float
    """The bytes of the delta for each byte of values."""

    def is_like(self, share: float) -> bool:
        """Whether the codec does as well for another box."""
        return _LIKE[0] * self.share <= share <= _LIKE[1] * self.share


def _options(codec: str | None, earlier: RankValues | None, check: bool) -> EncodingOptions | None:
    if codec is not None:
        return EncodingOptions.of(codec, check=check)
    return None if earlier is None else EncodingOptions.of(AUTO, check=check)


def _parameter(box: RankBox, name: str, path: Path) -> Parameter:
    """A box as a parameter of its own. Its tensors are not yet at their places."""
    own = box.place.own
    states = {s: Tensor.of(FileBlob.packed(path, 0, own, DTYPES[dtype])) for s, dtype in box.states.items()}
    return Parameter(name, box.role, states)


def _check_distinct(boxes: Sequence[RankBox], own: Sequence[Parameter]) -> None:
    if len({parameter.name for parameter in own}) < len(own):
        names = [parameter.name for parameter in own]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(
            f"two boxes have the same elements: {printable(twice)}", hint="States with the same elements are one box."
        )
    places = [(box.parameter, box.place) for box in boxes]
    assert len(set(places)) == len(places)


def _placed(
    boxes: Sequence[RankBox], own: Sequence[Parameter], path: Path, begin: int, hashed: bool
) -> tuple[list[_OpenBox], int]:
    """All boxes with the places of their states in a file, from byte `begin` on: those with aligned ends come first.

    Also where the last one ends. States follow one another without gaps.
    """
    opened = [_OpenBox(box, parameter) for box, parameter in zip(boxes, own, strict=True)]
    keys = [(number, state) for number, parameter in enumerate(own) for state in parameter.states]
    keys.sort(key=lambda key: _last(own[key[0]].states[key[1]]))
    at = begin
    for number, state in keys:
        tensor = own[number].states[state]
        placed = Tensor.of(FileBlob.packed(path, at, tensor.shape, tensor.dtype))
        opened[number].states[state] = _OpenState(placed, at, ChunkDigests(tensor) if hashed else None)
        at += tensor.nbytes
    for one in opened:
        one.states = {state: one.states[state] for state in one.box.states}
        one.parameter = replace(one.parameter, states={state: s.tensor for state, s in one.states.items()})
    return opened, at


def _last(tensor: Tensor) -> tuple[bool, int]:
    """The order in a file: states of aligned length, then those of larger elements."""
    is_aligned = prod(tensor.shape) * tensor.dtype.itemsize % ALIGNMENT == 0
    return not is_aligned, 0 if is_aligned else -tensor.dtype.itemsize


def _plain_entry(opened: _OpenBox, number: int) -> ParameterEntry:
    states = {}
    for state, own in opened.states.items():
        assert own.digests is not None
        extent = Extent(number, own.offset, own.tensor.nbytes)
        states[state] = StateEntry(own.tensor.dtype.name, own.tensor.shape, own.digests.digests(), extent)
    return ParameterEntry(opened.parameter.name, opened.box.role, states)
