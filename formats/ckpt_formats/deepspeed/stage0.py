"""ZeRO stage 0: the whole optimizer in one file, by number. Which name has which number is not stored.

It can be found: an optimizer's groups list their parameters in the order of the
module, so the module's order must be a merge of theirs. Shapes and, where a
master exists, the first values decide which group each parameter comes from.
Where that leaves a choice, we refuse to choose.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ckpt_codecs import Rounded
from ckpt_formats.base import MASTER, Group
from ckpt_formats.deepspeed.states import Optimized, Sorted, options_of, sort_state
from ckpt_formats.deepspeed.tree import get, is_tensor, tensor, vector
from ckpt_formats.errors import Unsupported
from ckpt_formats.files import Reader
from ckpt_formats.geometry import slabs
from ckpt_formats.tensor import Array, Raw, Tensor, read
from ckpt_formats.torchfile import TorchFile
from ckpt_formats.values import Value

_LOOK = 64
_MOST_STEPS = 2_000_000


@dataclass(frozen=True)
class Named:
    """A tensor of the model, and what it is called."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class _Slot:
    """A parameter of the optimizer, known by its number: its master if there is one, and its state."""

    master: Tensor | None
    state: Sorted


class _Run:
    """The parameters of one group in order; each either has a slot of its own, or a range of flat vectors."""

    def __init__(self, slots: Sequence[_Slot] | None, flat: Raw | None, state: Sorted | None, file: TorchFile) -> None:
        self.slots, self.flat, self.state, self.file = slots, flat, state, file

    def ends(self, at: int) -> bool:
        return at == (self.flat.shape[0] if self.flat is not None else len(self.slots or ()))

    def fits(self, at: int, named: Named, reader: Reader) -> int | None:
        """Where the run goes on if this tensor comes next in it; None if it cannot."""
        shape = named.tensor.shape
        if self.flat is not None:
            end = at + prod(shape)
            if end > self.flat.shape[0] or not _looks(Tensor.of(self.flat.flat(at, end).shaped(shape)), named.tensor, reader):
                return None
            return end
        if self.slots is None or at >= len(self.slots):
            return None
        slot = self.slots[at]
        known = [slot.master] if slot.master else [tensor(v[0], self.file.path) for v in slot.state.vectors.values()]
        if any(one.shape != shape for one in known) or (slot.master and not _looks(slot.master, named.tensor, reader)):
            return None
        return at + 1

    def states(self, at: int, end: int, named: Named) -> tuple[dict[str, Tensor], dict[str, Value]]:
        """The states of the parameter between two places of the run."""
        shape = named.tensor.shape
        if self.flat is not None and self.state is not None:
            vectors = {MASTER: self.flat} | {k: vector(v[0], self.file.path) for k, v in self.state.vectors.items()}
            cut = {key: Tensor.of(whole.flat(at, end).shaped(shape)) for key, whole in vectors.items()}
            return {**cut, **self.state.scalars}, dict(self.state.values)
        slot = (self.slots or ())[at]
        masters = {MASTER: slot.master} if slot.master else {}
        vectors_of = {key: tensor(value[0], self.file.path) for key, value in slot.state.vectors.items()}
        return {**masters, **vectors_of, **slot.state.scalars}, dict(slot.state.values)


def read_whole(
    file: TorchFile, optimizer: Mapping[Value, Value], named: Sequence[Named], *, skips: bool = True
) -> Optimized:
    """Give the optimizer's parameters their names. Raises `Unsupported` if two ways fit, or none.

    Tensors may be skipped, being frozen; a pipeline stage, which knows the layers
    of later stages as well, takes them from the first on without skipping.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups = get(inner, "param_groups", list, file.path)
    runs = list(_runs(file, optimizer, inner, groups))
    found = Optimized()
    taken: list[list[str]] = [[] for _ in runs]
    with Reader(check=False) as reader:
        for g, at, end, one in _one_way(runs, named, reader, file, skips):
            found.states[one.name], found.values[one.name] = runs[g].states(at, end, one)
            taken[g].append(one.name)
    _steps(found, taken)
    found.groups = [Group(options_of(group, file.path), tuple(names)) for group, names in zip(groups, taken, strict=True)]
    return found


def _runs(
    file: TorchFile, optimizer: Mapping[Value, Value], inner: Mapping[Value, Value], groups: Sequence[Value]
) -> Iterator[_Run]:
    states = get(inner, "state", dict, file.path)
    for g, group in enumerate(groups):
        numbers = get(group, "params", list, file.path)
        if "fp32_groups_flat" in optimizer:
            flat = vector(get(get(optimizer, "fp32_groups_flat", list, file.path), g, object, file.path), file.path)
            yield _Run(None, flat, sort_state([states.get(n, {}) for n in numbers[:1]] or [{}], [file]), file)
            continue
        masters: list[Value] = [None] * len(numbers)
        if "fp32_groups" in optimizer:
            masters = get(get(optimizer, "fp32_groups", list, file.path), g, list, file.path)
        slots = [
            _Slot(tensor(master, file.path) if is_tensor(master) else None, sort_state([states.get(n, {})], [file]))
            for n, master in zip(numbers, masters, strict=True)
        ]
        yield _Run(slots, None, None, file)


def _one_way(
    runs: Sequence[_Run], named: Sequence[Named], reader: Reader, file: TorchFile, skips: bool
) -> list[tuple[int, int, int, Named]]:
    """The one way in which the module's order is a merge of the groups' orders."""
    ways: list[list[tuple[int, int, int, Named]]] = []
    dead: set[tuple[int, tuple[int, ...]]] = set()
    path: list[tuple[int, int, int, Named]] = []
    # Depth first, on a stack of our own: (tensor, place in each run, next choice to try, ways known on entry).
    stack: list[tuple[int, tuple[int, ...], int, int]] = [(0, (0,) * len(runs), 0, 0)]
    steps = 0
    while stack and len(ways) < 2 and steps < _MOST_STEPS:
        i, places, choice, known = stack.pop()
        steps += 1
        ended = choice == 0 and all(run.ends(at) for run, at in zip(runs, places, strict=True))
        if ended:
            ways.append(list(path))
        if ended or i == len(named) or choice > len(runs) - (not skips) or (choice == 0 and (i, places) in dead):
            if len(ways) == known:
                dead.add((i, places))
            if path:
                path.pop()
            continue
        stack.append((i, places, choice + 1, known))
        if choice == len(runs):  # frozen: in no group
            path.append((-1, 0, 0, named[i]))
            stack.append((i + 1, places, 0, len(ways)))
        elif (end := runs[choice].fits(places[choice], named[i], reader)) is not None:
            path.append((choice, places[choice], end, named[i]))
            stack.append((i + 1, (*places[:choice], end, *places[choice + 1 :]), 0, len(ways)))
    if len(ways) != 1:
        why = "more than one way fits" if ways else "no way fits"
        raise Unsupported(
            f"a stage 0 checkpoint numbers its optimizer states without naming them, and {why} to name them",
            where=file.path,
            hint="Convert the weights alone with --model-only, or save from ZeRO stage 1.",
        )
    return [step for step in ways[0] if step[0] >= 0]


def _looks(master: Tensor, copy: Tensor, reader: Reader) -> bool:
    """Do the first values of the master round to those of the copy?"""
    if master.shape != copy.shape:
        return False
    for box in slabs(master.shape, _LOOK):
        values, rounded = read(copy.crop(box), reader), Rounded().decode(b"", box.shape, copy.dtype, read(master.crop(box), reader))
        return _bits(values) == _bits(rounded)
    return True


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _steps(found: Optimized, groups: Sequence[Sequence[str]]) -> None:
    """DeepSpeed's fused Adam counts only the last parameter of a group and uses that count for all of them."""
    for names in groups:
        counts: list[Any] = [found.values[name].get("step") for name in names]
        if counts and all(isinstance(count, int) for count in counts) and len(set(counts)) > 1:
            for name in names:
                found.values[name]["step"] = max(counts)
