"""Values that are changed other than by rounding, counted where they are computed.

A cast to a type with a smaller range makes large numbers infinite or NaN, and small ones zero. A mean of checkpoints
or a merged adapter has NaN where a source has it. `Reader` collects these counts by block of the new tensor, receipts
carry them from thread to thread and from machine to machine, and the end of a job says them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.notices import MAX_NAMES, Notice, Weight
from ckpt_formats.core.text import counted, list_names, printable

Array = np.ndarray[Any, DType]
_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
"""The bits of infinity."""
_MAX_COMPARED = 1000
"""Blocks of one tensor that are compared with each other: of more, only equal ones are known to be the same."""


@dataclass(frozen=True)
class Kinds:
    """How many elements of an array are not ordinary numbers."""

    zeros: int = 0
    nans: int = 0
    infinities: int = 0

    @property
    def not_finite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.nans + self.infinities


def count_kinds(values: Array) -> Kinds:
    """The zeros, NaNs and infinities of an array.

    values: of any shape; floats or complex numbers of any dtype. None are counted of other types.
    """
    if values.dtype.kind == "c":
        pairs = np.ascontiguousarray(values).reshape(-1).view(f"f{values.dtype.itemsize // 2}")
        return replace(count_kinds(pairs), zeros=0)
    if not is_float(values.dtype) or not values.size:
        return Kinds()
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    if values.dtype.itemsize == 1:
        return _of_bytes(bits, values.dtype)
    infinity = _INFINITIES[values.dtype.name]
    sizes = bits & bits.dtype.type((1 << (8 * values.dtype.itemsize - 1)) - 1)
    zeros = sizes.size - int(np.count_nonzero(sizes))
    if int(sizes.max()) < infinity:
        return Kinds(zeros)
    nans = int(np.count_nonzero(sizes > infinity))
    return Kinds(zeros, nans, int(np.count_nonzero(sizes == infinity)))


def _of_bytes(codes: Array, dtype: DType) -> Kinds:
    counts = np.bincount(codes, minlength=256)
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    zero, nan, infinite = numbers == 0, np.isnan(numbers), np.isinf(numbers)
    return Kinds(int(counts[zero].sum()), int(counts[nan].sum()), int(counts[infinite].sum()))


@dataclass(frozen=True)
class ValueChange:
    """The values of a block of a tensor that were changed other than by rounding."""

    name: str
    """The parameter."""
    dtype: str
    """The element type of the values."""
    box: Box
    overflows: int = 0
    """Finite numbers that became infinite or NaN."""
    underflows: int = 0
    """Numbers that became zero."""
    not_finite: int = 0
    """Results of a computation that are NaN or infinite, whether a source was or the type is too small."""
    refused: bool = False
    """Whether the user has to allow overflows."""

    def __bool__(self) -> bool:
        return bool(self.overflows or self.underflows or self.not_finite)

    def __add__(self, other: "ValueChange") -> "ValueChange":
        """The counts of both, as those of this block."""
        return replace(
            self,
            overflows=self.overflows + other.overflows,
            underflows=self.underflows + other.underflows,
            not_finite=self.not_finite + other.not_finite,
        )

    def joined(self, other: "ValueChange") -> "ValueChange | None":
        """Both blocks as one, if the other begins where this one ends along the first axis; else None."""
        a, b = self.box, other.box
        fit = a.stop[:1] == b.start[:1] and (a.start[1:], a.stop[1:]) == (b.start[1:], b.stop[1:])
        return replace(self + other, box=Box(a.start, b.stop)) if fit and a.start else None


def changed_by_cast(name: str, box: Box, before: Array, after: Array, refused: bool = False) -> ValueChange:
    """What a cast changed other than by rounding.

    before, after: the values of the block, of one shape, which may be any, and of any float dtypes.
    """
    new = count_kinds(after)
    old = count_kinds(before) if new != Kinds() else Kinds()
    overflows, underflows = new.not_finite - old.not_finite, new.zeros - old.zeros
    return ValueChange(name, after.dtype.name, box, max(0, overflows), max(0, underflows), refused=refused)


@dataclass
class ValueChanges:
    """The changes that one reader has seen, by tensor and type. A block that is computed again counts once."""

    _blocks: dict[tuple[str, str], list[ValueChange]] = field(default_factory=dict)

    def note(self, change: ValueChange) -> None:
        """Add what is changed in a block."""
        known = self._blocks.setdefault((change.name, change.dtype), [])
        if known and known[-1].box & change.box == change.box:
            return
        joined = known[-1].joined(change) if known else None
        if joined is not None:
            known[-1] = joined
        elif known and not known[-1]:
            known[-1] = change  # nothing was changed there
        else:
            known.append(change)

    def seen(self) -> tuple[ValueChange, ...]:
        """Those blocks in which something was changed."""
        return tuple(change for changes in self._blocks.values() for change in changes if change)


@dataclass(frozen=True)
class ChangedTensor:
    """How many values of a tensor were changed other than by rounding."""

    name: str
    dtype: str
    overflows: int
    underflows: int
    not_finite: int
    refused: bool = False


def totals(changes: Iterable[ValueChange]) -> tuple[ChangedTensor, ...]:
    """The changes by tensor. Blocks that several files have count once; of such that overlap, the larger one counts."""
    blocks: dict[tuple[str, str], dict[Box, ValueChange]] = {}
    for change in changes:
        blocks.setdefault((change.name, change.dtype), {})[change.box] = change
    result = []
    for (name, dtype), own in blocks.items():
        total = ValueChange(name, dtype, Box((), ()))
        for change in _disjoint(own):
            total += change
        refused = any(change.refused and change.overflows for change in own.values())
        result.append(ChangedTensor(name, dtype, total.overflows, total.underflows, total.not_finite, refused))
    return tuple(result)


def _disjoint(own: Mapping[Box, ValueChange]) -> Iterator[ValueChange]:
    taken: list[Box] = []
    for box, change in sorted(own.items(), key=lambda item: -item[0].size):
        if len(taken) < _MAX_COMPARED and any(len(box.start) == len(one.start) and box & one for one in taken):
            continue
        taken.append(box)
        yield change


def notices(tensors: Sequence[ChangedTensor]) -> Iterator[Notice]:
    """What the user should know of the changes: how many values of which tensors."""
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        for kind, text in _TEXTS.items():
            counts = {one.name: getattr(one, kind) for one in tensors if one.dtype == dtype and getattr(one, kind)}
            if counts:
                total = sum(counts.values())
                head = f"{counted(total, 'value')} of {counted(len(counts), 'tensor')} {'is' if total == 1 else 'are'}"
                names = tuple(f"{name} ({count:,})" for name, count in counts.items())
                yield Notice(f"{head} {text.format(dtype)}", names, Weight.LOST)


_TEXTS = {
    "overflows": "too large for {} and became infinite or NaN",
    "underflows": "too small for {} and became zero",
    "not_finite": "NaN or infinite in the result",
}


def check_allowed(tensors: Sequence[ChangedTensor]) -> None:
    """Raise `UnsupportedError` if values overflow that have to be allowed."""
    refused = [one for one in tensors if one.refused and one.overflows]
    if refused:
        names = list_names(refused, lambda one: f"{printable(one.name)} ({one.overflows:,})", MAX_NAMES)
        total = sum(one.overflows for one in refused)
        raise UnsupportedError(
            f"{counted(total, 'value')} {'is' if total == 1 else 'are'} too large for {refused[0].dtype} "
            f"and would become infinite or NaN: {names}",
            hint="Take a type with a larger range, such as bf16. --allow-overflow, or cast(..., allow_overflow=True), "
            "writes them as infinite or NaN.",
        )
