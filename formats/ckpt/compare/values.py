"""Differences besides tensors: counters, options of the optimizer, extras."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from ckpt.compare.result import ValueDiff
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_table import Places, TabulatedParameters
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.core.values import Value

_GAP = 1 << 12
"""Bytes between two numbers that are rather read than skipped."""
_READ = 4 << 20
"""Bytes that are read at once."""


def values(first: Checkpoint, second: Checkpoint) -> Iterator[ValueDiff]:
    """Every difference. A value of a parameter or group that only one of two engines stores is none."""
    yield from _counters(first, second)
    yield from _options(first, second)
    yield from _apart(encode(dict(first.extras)), encode(dict(second.extras)), ())


class _Together:
    """Parameters whose values changed in the same way."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}

    def add(self, key: str, first: Any, second: Any, name: str) -> None:
        one, other = (json.dumps(value, sort_keys=True) for value in (first, second))
        self._names.setdefault((key, one, other), (first, second, []))[2].append(name)

    def sorted(self, kind: Literal["counter", "option"]) -> Iterator[ValueDiff]:
        for (key, _, _), (first, second, names) in sorted(self._names.items(), key=lambda item: item[0]):
            yield ValueDiff(kind, key, first, second, tuple(names))


def _counters(first: Checkpoint, second: Checkpoint) -> Iterator[ValueDiff]:
    """Differences of the numbers of parameters, such as their step counts."""
    a, b = _numbers_of(first), _numbers_of(second)
    together = _Together()
    for name in (name for name in a if name in b):
        for key in a[name].keys() & b[name].keys():
            one, other = encode(a[name][key]), encode(b[name][key])
            if one != other:
                together.add(key, one, other, name)
    yield from together.sorted("counter")


def _numbers_of(source: Checkpoint) -> dict[str, dict[str, Value]]:
    """The numbers of each parameter. A `step` is a number, whether it is stored as a tensor or as a number."""
    numbers: dict[str, dict[str, Value]] = {}
    if isinstance(source.parameters, TabulatedParameters):
        table, steps = source.parameters.table, _step_counts(source.parameters)
        for at, (name, number) in enumerate(zip(table.names, table.value.tolist(), strict=True)):
            own = numbers[name] = dict(table.values[number])
            step = steps.get(at, own.get("step"))
            if isinstance(step, (int, float)):
                own["step"] = _plain(step)
        return numbers
    with Reader(check=False) as reader:
        for name, parameter in source.parameters.items():
            own = numbers[name] = dict(parameter.values)
            step, tensor = own.get("step"), parameter.states.get("step")
            if tensor is not None and tensor.shape == ():
                own["step"] = _plain(float(read(tensor, reader)))
            elif isinstance(step, (int, float)):
                own["step"] = _plain(step)
    return numbers


def _step_counts(parameters: TabulatedParameters) -> dict[int, float]:
    """The step count of each parameter that has it as a tensor of one number, by the number of the parameter.

    Neighbours in a file are read together.
    """
    table = parameters.table
    rows = table.rows_named("step")
    rows = rows[rows >= 0]
    rows = rows[table.rank[rows] == 0]
    counts: dict[int, float] = {}
    if not len(rows):
        return counts
    places = parameters.places()
    with Reader(check=False) as reader:
        for number, dtype in enumerate(table.dtypes):
            if dtype.kind in "iub" or is_float(dtype):
                own = rows[(table.dtype[rows] == number) & (places.file[rows] >= 0)]
                values = _plain_numbers(places, own, dtype, reader)
                counts |= dict(zip(table.owner[own].tolist(), values, strict=False))
        for row in rows.tolist():
            owner = int(table.owner[row])
            if owner not in counts:
                counts[owner] = float(read(parameters[table.names[owner]].states["step"], reader))
    return counts


def _plain_numbers(places: Places, rows: Array, dtype: DType, reader: Reader) -> list[float]:
    """The numbers of states that lie plain in files; none if a file cannot be read."""
    order = np.lexsort((places.offset[rows], places.file[rows]))
    files, offsets, width = places.file[rows][order], places.offset[rows][order], dtype.itemsize
    values = np.zeros((len(rows), width), np.uint8)
    breaks = (np.diff(files) != 0) | (np.diff(offsets) > _GAP) | (np.diff(offsets // _READ) != 0)
    for part in np.split(np.arange(len(rows)), np.flatnonzero(breaks) + 1) if len(rows) else ():
        start, stop = int(offsets[part[0]]), int(offsets[part[-1]]) + width
        data = np.empty(stop - start, np.uint8)
        try:
            reader.read_into(places.files[files[part[0]]], start, data.data)
        except CkptError:
            return []  # to read one by one says which
        values[order[part]] = data[(offsets[part] - start)[:, None] + np.arange(width)]
    numbers: list[float] = values.view(dtype).reshape(-1).astype(np.float64).tolist()
    return numbers


def _plain(step: float) -> float:
    """An int if the value is a whole number, so that 3.0 and 3 are the same step."""
    return int(step) if step == step // 1 else float(step)


def _options(first: Checkpoint, second: Checkpoint) -> Iterator[ValueDiff]:
    """Differences of the options of groups, by their parameters, since groups have no names."""
    first_options, second_options = (
        {name: group.options for group in c.groups for name in group.names} for c in (first, second)
    )
    together = _Together()
    known: dict[tuple[int, int], list[tuple[str, Any, Any]]] = {}
    for name in (name for name in first_options if name in second_options):
        one, other = first_options[name], second_options[name]
        if (id(one), id(other)) not in known:  # parameters of a group share its options
            known[id(one), id(other)] = list(_changes(one, other))
        for key, a, b in known[id(one), id(other)]:
            together.add(key, a, b, name)
    yield from together.sorted("option")


def _changes(one: Mapping[str, Value], other: Mapping[str, Value]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(one.keys() & other.keys()):
        a, b = encode(one[key]), encode(other[key])
        if a != b and _listed(a) != _listed(b):
            yield key, a, b


def _listed(value: Any) -> Any:
    """The items of a tuple as a list, since lists and tuples of the same items are the same option."""
    return value["$tuple"] if isinstance(value, dict) and set(value) == {"$tuple"} else value


def _apart(a: Any, b: Any, place: tuple[str, ...]) -> Iterator[ValueDiff]:
    """Where two trees of JSON differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() & b.keys():
        for key in sorted(a.keys() | b.keys()):
            own = (*place, key)
            if key not in b:
                yield ValueDiff("extra", "/".join(own), a[key], None, only_in="first")
            elif key not in a:
                yield ValueDiff("extra", "/".join(own), None, b[key], only_in="second")
            else:
                yield from _apart(a[key], b[key], own)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and _are_trees(a) and _are_trees(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _apart(one, other, (*place, str(i)))
    elif a != b:
        yield ValueDiff("extra", "/".join(place), a, b)


def _are_trees(items: list[Any]) -> bool:
    return any(isinstance(item, dict) for item in items)
