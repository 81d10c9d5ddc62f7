"""What differs between two checkpoints, whatever engines and layouts wrote them.

Tensors are paired by parameter and state. What the optimizer updates is one
state, the `weight`, whether a checkpoint calls it master or parameter; the copy
that a model computes with is a state of its own where there is a master too.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, Literal

import numpy as np

from ckpt_cli.executors import results
from ckpt_cli.interrupts import heeding
from ckpt_cli.pipeline import Effort, Moved
from ckpt_formats.base import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.dtypes import is_float
from ckpt_formats.files import Reader
from ckpt_formats.tensor import Array, Tensor, read
from ckpt_formats.transfer import Transfer, as_bytes
from ckpt_formats.typed_json import encode

Kind = Literal["equal", "changed", "retyped", "reshaped", "missing", "added"]
"""`retyped`: of another element type, and compared by value. `missing` is in the first only, `added` in the second."""

WEIGHT = "weight"


@dataclass(frozen=True)
class Sums:
    """What adds up over the blocks of a pair. An element that is not finite on both sides is only counted."""

    elements: int = 0
    changed: int = 0
    largest: float = 0.0
    squares: float = 0.0
    """Of the differences."""
    first: float = 0.0
    """Squares of the first tensor's elements; `second` likewise, `product` of both."""
    second: float = 0.0
    product: float = 0.0
    not_finite: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.elements + other.elements,
            self.changed + other.changed,
            max(self.largest, other.largest),
            self.squares + other.squares,
            self.first + other.first,
            self.second + other.second,
            self.product + other.product,
            self.not_finite + other.not_finite,
        )

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return sqrt(self.squares / self.elements) if self.elements else 0.0

    @property
    def relative(self) -> float | None:
        """Norm of the difference over the norm of the first; None where that is 0."""
        return sqrt(self.squares / self.first) if self.first else None

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; None where one is 0."""
        norm = sqrt(self.first) * sqrt(self.second)
        return max(-1.0, min(1.0, self.product / norm)) if norm else None


@dataclass(frozen=True)
class Pair:
    """One state of one parameter, in either checkpoint or both."""

    name: str
    state: str
    kind: Kind
    what: str = ""
    sums: Sums = Sums()


@dataclass(frozen=True)
class Differences:
    """All that was compared, and what else differs."""

    pairs: tuple[Pair, ...]
    values: tuple[str, ...] = ()
    """Numbers kept of single parameters, options of groups and their members, and extras, in words."""
    same_step: bool = True

    @property
    def same(self) -> bool:
        """Is every bit of every tensor equal, and everything else that was compared?"""
        return not self.values and self.same_step and all(pair.kind == "equal" for pair in self.pairs)


def amount(first: Checkpoint, second: Checkpoint) -> int:
    """Bytes that `compare` will read, about."""
    ours, theirs = tensors_by_state(first), tensors_by_state(second)
    return sum(ours[key].nbytes + theirs[key].nbytes for key in ours.keys() & theirs.keys())


def compare(
    first: Checkpoint,
    second: Checkpoint,
    effort: Effort,
    moved: Moved = lambda nbytes: None,
    tensors_only: bool = False,
) -> Differences:
    """Everything that differs. Reads each byte of both once."""
    ours, theirs = tensors_by_state(first), tensors_by_state(second)
    pairs = [Pair(*key, "missing", _described(tensor)) for key, tensor in ours.items() if key not in theirs]
    pairs += [Pair(*key, "added", _described(tensor)) for key, tensor in theirs.items() if key not in ours]
    with heeding(moved) as count:
        work = [partial(_pair, *key, a, theirs[key], effort, count) for key, a in ours.items() if key in theirs]
        with ThreadPoolExecutor(effort.workers, "ckpt") as pool:
            pairs += results(pool, lambda job: job(), work, 2 * effort.workers)
    order = {key: number for number, key in enumerate((*ours, *theirs))}
    pairs.sort(key=lambda pair: order[pair.name, pair.state])
    if tensors_only:
        return Differences(tuple(pairs))
    step = first.origin.step == second.origin.step
    return Differences(tuple(pairs), tuple(_values(first, second)), step)


def tensors_by_state(source: Checkpoint) -> dict[tuple[str, str], Tensor]:
    """Every tensor by parameter and state, under names that do not depend on who wrote them. Ties count once a name."""
    found: dict[tuple[str, str], Tensor] = {}
    for name, parameter in source.parameters.items():
        found |= {(name, state): tensor for state, tensor in _states(parameter)}
    for alias, name in source.aliases.items():
        if name in source.parameters:
            found[alias, WEIGHT] = _weight(source.parameters[name])
    return found


def _states(parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
    yield WEIGHT, _weight(parameter)
    if MASTER in parameter.states and MODEL in parameter.states:
        yield MODEL, parameter.states[MODEL]
    for state, tensor in parameter.states.items():
        counter = state == "step" and tensor.shape == ()
        if state not in (MASTER, MODEL) and not counter:
            yield state, tensor


def _weight(parameter: Parameter) -> Tensor:
    return parameter.states.get(MASTER, parameter.weight)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _pair(name: str, state: str, a: Tensor, b: Tensor, effort: Effort, moved: Moved) -> Pair:
    if a.shape != b.shape:
        return Pair(name, state, "reshaped", f"{_described(a)} -> {_described(b)}")
    total = Sums()
    with Reader(check=False, most_files=effort.files) as reader:
        transfer = Transfer(reader, effort.slab, moved)
        for box in transfer.boxes(a):
            total += sums_of(transfer.fetch(a, box, "first"), transfer.fetch(b, box, "second"))
    if a.dtype != b.dtype:
        return Pair(name, state, "retyped", f"{a.dtype.name} -> {b.dtype.name}", total)
    return Pair(name, state, "changed" if total.changed else "equal", "", total)


def sums_of(a: Array, b: Array) -> Sums:
    """Compare two blocks of one shape: bit for bit if they have one type, else by value."""
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    x, y = _numbers(a), _numbers(b)
    if a.dtype == b.dtype:
        unequal = as_bytes(a).reshape(-1, a.dtype.itemsize) != as_bytes(b).reshape(-1, a.dtype.itemsize)
        changed = int(unequal.any(axis=1).sum()) if unequal.any() else 0
    else:
        changed = int((~((x == y) | (np.isnan(x) & np.isnan(y)))).sum())
    finite = np.isfinite(x) & np.isfinite(y)
    strange = x.size - int(finite.sum())
    if strange:
        x, y = x[finite], y[finite]
    first = float(np.vdot(x, x).real)
    if not changed:
        return Sums(a.size, 0, 0.0, 0.0, first, first, first, strange)
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(y - x)
        sums = float(np.vdot(off, off)), first, float(np.vdot(y, y).real), float(np.vdot(x, y).real)
    return Sums(a.size, changed, float(off.max(initial=0.0)), *sums, strange)


def _numbers(values: Array) -> Array:
    """As float64, or complex128."""
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    if is_float(values.dtype) or values.dtype.kind in "iub":
        return values.astype(np.float64)
    return as_bytes(values).astype(np.float64)


def _values(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    steps, others = _counts(first), _counts(second)
    apart = [name for name in steps.keys() & others.keys() if steps[name] != others[name]]
    if apart:
        name = min(apart)
        yield f"step of {len(apart)} parameters, such as `{name}`: {steps[name]:g} -> {others[name]:g}"
    yield from _groups(first, second)
    yield from _apart(encode(dict(first.extras)), encode(dict(second.extras)), "extras")


def _counts(source: Checkpoint) -> dict[str, float]:
    """How many steps each parameter has seen, whether a tensor tells or a number."""
    found: dict[str, float] = {}
    with Reader(check=False) as reader:
        for name, parameter in source.parameters.items():
            tensor, value = parameter.states.get("step"), parameter.values.get("step")
            if tensor is not None and tensor.shape == ():
                found[name] = float(read(tensor, reader))
            elif isinstance(value, (int, float)):
                found[name] = float(value)
    return found


def _groups(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    """Options of the groups that parameters are in, since groups have no names."""
    ours, theirs = ({name: group.options for group in c.groups for name in group.names} for c in (first, second))
    said: dict[str, list[str]] = {}
    for name in ours.keys() & theirs.keys():
        for key in sorted(ours[name].keys() & theirs[name].keys()):
            a, b = encode(ours[name][key]), encode(theirs[name][key])
            if a != b and _listed(a) != _listed(b):
                said.setdefault(f"{key}: {_short(a)} -> {_short(b)}", []).append(name)
    for what, names in sorted(said.items()):
        yield f"option of the optimizer for {len(names)} parameters, {what}"


def _listed(value: Any) -> Any:
    """Lists and tuples of the same items are the same option."""
    return value["$tuple"] if isinstance(value, dict) and set(value) == {"$tuple"} else value


def _apart(a: Any, b: Any, place: str) -> Iterator[str]:
    """Where two trees of JSON differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() & b.keys():
        for key in sorted(a.keys() | b.keys()):
            if key not in b:
                yield f"{place}/{key}: only in the first, {_short(a[key])}"
            elif key not in a:
                yield f"{place}/{key}: only in the second, {_short(b[key])}"
            else:
                yield from _apart(a[key], b[key], f"{place}/{key}")
    elif a != b:
        yield f"{place}: {_short(a)} -> {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
