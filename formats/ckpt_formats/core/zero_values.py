"""Zeros that mean something: a file of which a part was never written, weights or an optimizer of nothing but zeros.

Most zeros are right: biases, moments at step 0, adapters before the first step, rows of padding. Three are not, and
each is one notice:

- A crash or an unfinished download leaves zeros that begin or end anywhere in a tensor. Padding begins at a row.
- A weight of 1 MiB or more that is zero throughout.
- An optimizer all of whose states are zero after 100 steps. The first steps may be skipped because of overflows.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import FileBlob, Tensor, read
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.core.zero_runs import LONG, ZeroRun, joined_runs

_LATER = 100
"""Steps after which an optimizer has had a gradient."""
_COUNT = "step"
_BIAS = re.compile(r".*bias(es)?\d*", re.IGNORECASE)
_ADAPTER = re.compile(r"lora_(B|up)\b|lora_embedding_B|zero_conv")
"""In the names of weights that are zero before the first step."""
_NEAR = 64
"""Bytes around the beginning of a row that may be zero by accident, or were not noted because they are few."""


def zero_notices(source: Checkpoint, runs: Iterable[ZeroRun]) -> Iterator[Notice]:
    """What the user should know of the zeros in what was read of a checkpoint, by its own tensors.

    Nothing is read again; if a whole optimizer is zero, its count of steps is read.
    """
    zeros = _Zeros(joined_runs(runs))
    if not zeros.files:
        return
    step = source.step
    if zeros.has_long:
        cut, nbytes = _cut_by_zeros(source, zeros)
        for file, names in cut.items():
            where = printable(file.rpartition("/")[2])
            text = f"{format_nbytes(nbytes[file])} of {where} are zero from inside a tensor on, as after a crash or an"
            yield Notice(f"{text} unfinished download; {_tensors(names)}", tuple(names), Weight.UNSURE)
        known = {name for names in cut.values() for name in names}
        empty = [p.name for p in source.parameters.values() if p.name not in known and _is_empty(p, zeros, step)]
        if empty:
            text = f"{_tensors(empty)} of 1 MiB or more {'is' if len(empty) == 1 else 'are'} zero in every element"
            yield Notice(text, tuple(empty), Weight.UNSURE)
    yield from _optimizer(source, zeros)


def _tensors(names: Iterable[str]) -> str:
    count = len(list(names))
    return f"{count:,} tensor{'s' * (count != 1)}"


@dataclass(frozen=True)
class _WeightRange:
    """A range of a file: all bytes of a tensor, or of a fragment of one."""

    name: str
    blob: FileBlob

    @property
    def start(self) -> int:
        return self.blob.offset

    @property
    def stop(self) -> int:
        return self.blob.offset + self.blob.span


class _Zeros:
    """The runs of zeros, by file."""

    def __init__(self, runs: Iterable[ZeroRun]) -> None:
        self.files: dict[str, list[ZeroRun]] = {}
        for run in runs:
            self.files.setdefault(run.file, []).append(run)
        self.has_long = any(run.stop - run.start >= LONG for runs in self.files.values() for run in runs)

    def at(self, file: str, start: int, stop: int) -> Iterator[ZeroRun]:
        """The runs with bytes in a range."""
        runs = self.files.get(file, [])
        for number in range(max(0, bisect_right(runs, start, key=lambda run: run.start) - 1), len(runs)):
            if runs[number].start >= stop:
                return
            if runs[number].stop > start:
                yield runs[number]

    def cover(self, tensor: Tensor) -> bool:
        """Whether all values of a tensor are in files, and zero."""
        return tensor.size > 0 and (blobs := list(tensor.sources())) != [] and all(map(self._covers, blobs))

    def _covers(self, blob: FileBlob) -> bool:
        start, stop = blob.offset, blob.offset + blob.span
        return any(run.start <= start and stop <= run.stop for run in self.at(str(blob.path), start, stop))


def _cut_by_zeros(source: Checkpoint, zeros: _Zeros) -> tuple[dict[str, list[str]], dict[str, int]]:
    """By file: the weights in zeros that no values explain, and how many bytes of these there are."""
    places: dict[str, list[_WeightRange]] = {}
    for parameter, _, tensor in source.tensors():
        for blob in tensor.sources():
            if (file := str(blob.path)) in zeros.files:
                places.setdefault(file, []).append(_WeightRange(parameter.name, blob))
    names: dict[str, list[str]] = {}
    nbytes: dict[str, int] = {}
    for file, own in places.items():
        end = max(place.stop for place in own)
        bad = dict.fromkeys(
            run
            for place in own
            if len(place.blob.shape) > 1 and place.blob.is_packed
            for run in zeros.at(file, place.start, place.stop)
            if run.stop - run.start >= LONG and _is_cut(place, run, run.stop >= end)
        )
        if bad:
            within = (p.name for p in own if any(run.start < p.stop and p.start < run.stop for run in bad))
            names[file] = list(dict.fromkeys(within))
            nbytes[file] = sum(run.stop - run.start for run in bad)
    return names, nbytes


def _is_cut(place: _WeightRange, run: ZeroRun, is_last: bool) -> bool:
    """Whether zeros begin or end in a matrix where no row does, or take most of it up to the end of the file."""
    row = prod(place.blob.shape[1:]) * place.blob.dtype.itemsize
    begins, ends = run.start > place.start, run.stop < place.stop
    edges = ((run.start,) if begins else ()) + ((run.stop,) if ends else ())
    if any(_NEAR < (edge - place.start) % row < row - _NEAR for edge in edges):
        return True
    return begins and is_last and 2 * (place.stop - run.start) > place.stop - place.start


def _is_empty(parameter: Parameter, zeros: _Zeros, step: int | None) -> bool:
    """Whether a weight of 1 MiB or more is zero throughout, although such weights are not zero."""
    weight = parameter.states.get(MASTER, parameter.states.get(MODEL))
    if weight is None or weight.nbytes < LONG or parameter.role not in ("parameter", "frozen"):
        return False
    if step == 0 or not is_float(weight.dtype) or _BIAS.fullmatch(parameter.name.rpartition(".")[2]):
        return False
    if (step or 0) < _LATER and _ADAPTER.search(parameter.name):
        return False
    return zeros.cover(weight)


def _optimizer(source: Checkpoint, zeros: _Zeros) -> Iterator[Notice]:
    """A notice if all states of an optimizer are zero."""
    owners = list[Parameter]()
    for parameter in source.parameters.values():
        states = [t for s, t in parameter.states.items() if s not in (MASTER, MODEL) and t.shape and is_float(t.dtype)]
        if parameter.role == "extra" or not states:
            continue
        if not all(map(zeros.cover, states)):
            return
        owners.append(parameter)
    if not owners:
        return
    counts = [source.step, owners[0].values.get(_COUNT), *(group.options.get(_COUNT) for group in source.groups)]
    step = max(map(_number, (*counts, owners[0].states.get(_COUNT))))
    if step >= _LATER:
        names = tuple(parameter.name for parameter in owners)
        text = f"all states of the optimizer are zero, after {step:,} steps; {_tensors(names)}"
        yield Notice(text, names, Weight.UNSURE)


def _number(count: object) -> int:
    """A count of steps; 0 if it is none."""
    try:
        number = read(count) if isinstance(count, Tensor) and count.size == 1 else count
        return int(number) if isinstance(number, (int, float, np.ndarray)) else 0
    except (CkptError, ValueError, OverflowError):
        return 0
