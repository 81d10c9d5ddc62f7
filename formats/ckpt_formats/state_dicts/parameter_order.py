"""Optimizers that number their parameters: which name has which number?

PyTorch's optimizers store states by number and no names. But each group lists
its parameters in the order of the module, so the module's order is a merge of
the groups' orders. Shapes and, where there is a master, its first values
decide which group each tensor comes from. Where that leaves a choice, nobody
chooses: `only_assignment` refuses.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ckpt_codecs import Rounded
from ckpt_formats.core.errors import BadRules
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape, slabs
from ckpt_formats.core.tensor import Array, FileBlob, Tensor, read
from ckpt_formats.core.text import printable

BY_ORDER = (
    "the optimizer numbers its parameters, and their shapes allow several orders: they were taken in the order of the "
    "model's tensors (--param-order gives another)"
)
"""What is said where order alone decided."""
_LOOK = 64
_MAX_STEPS = 2_000_000


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the model, and what it is called."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class NumberedParameter:
    """A numbered parameter: its master, if there is one, and the shapes of other states, which depend on its own."""

    master: Tensor | None
    state_shapes: Mapping[str, Shape]

    def fits(self, tensor: Tensor, reader: Reader) -> bool:
        if self.master is not None:
            return _looks(self.master, tensor, reader)
        return all(is_state_of(name, shape, tensor.shape) for name, shape in self.state_shapes.items())


def is_state_of(state: str, shape: Shape, whole: Shape) -> bool:
    """Can a parameter of shape `whole` have a state of this name and shape?

    Factored second moments (Adafactor, Shazeer and Stern 2018; CAME) are means over the rows or the columns, which
    PyTorch's own keeps as an axis of 1: `row_var`, `col_var`, `exp_avg_sq_row`, `exp_avg_sq_col`.
    """
    words = state.split("_")
    if "row" in words and len(whole) > 1:
        return shape in (whole[:-1], (*whole[:-1], 1))
    if "col" in words and len(whole) > 1:
        return shape in ((*whole[:-2], whole[-1]), (*whole[:-2], 1, whole[-1]))
    return shape == whole


@dataclass(frozen=True)
class NumberedGroup:
    """The parameters of one group in order: a slot each, or one after another in a flat master."""

    slots: tuple[NumberedParameter, ...] = ()
    flat: FileBlob | None = None

    @property
    def end(self) -> int:
        """Where the run ends, in slots or in elements."""
        return len(self.slots) if self.flat is None else self.flat.shape[0]

    def after(self, at: int, tensor: Tensor, reader: Reader) -> int | None:
        """Where the run goes on if this tensor comes next; None if it cannot."""
        end = at + (1 if self.flat is None else prod(tensor.shape))
        if end > self.end:
            return None
        if self.flat is None:
            return end if self.slots[at].fits(tensor, reader) else None
        return end if _looks(Tensor.of(self.flat.flat(at, end).shaped(tensor.shape)), tensor, reader) else None


@dataclass(frozen=True)
class Assignment:
    """A tensor's place in a run."""

    run: int
    start: int
    stop: int
    name: str


Place = tuple[int, tuple[int, ...]]
"""How far the search is: in the module, and in each run."""


def only_assignment(
    runs: Sequence[NumberedGroup], module: Sequence[NamedTensor], *, skips: bool = True
) -> list[Assignment] | None:
    """The one way in which the module's order is a merge of the runs; None if there is none, or another.

    Tensors may be skipped, being frozen or buffers, unless `skips` is false: then
    all up to the last that has a place have one.
    """
    ways: list[list[Assignment]] = []
    dead: set[Place] = set()
    path: list[Assignment | None] = []
    # Depth first, on a stack of our own: a place, the next choice to try, the ways known on arrival.
    stack: list[tuple[Place, int, int]] = [((0, (0,) * len(runs)), 0, 0)]
    choices = len(runs) + skips
    steps = 0
    with Reader(check=False) as reader:
        while stack and len(ways) < 2 and steps < _MAX_STEPS:
            place, choice, known = stack.pop()
            i, at = place
            steps += 1
            ended = choice == 0 and all(run.end == a for run, a in zip(runs, at, strict=True))
            if ended:
                ways.append([match for match in path if match is not None])
            # Without this, the equal layers of a deep model would be tried against each other.
            slots = sum(run.end - a for run, a in zip(runs, at, strict=True) if run.flat is None)
            late = choice == 0 and slots > len(module) - i
            if ended or late or i == len(module) or choice == choices or (choice == 0 and place in dead):
                if len(ways) == known:
                    dead.add(place)
                if path:
                    path.pop()
                continue
            stack.append((place, choice + 1, known))
            if choice == len(runs):
                path.append(None)
                stack.append(((i + 1, at), 0, len(ways)))
            elif (end := runs[choice].after(at[choice], module[i].tensor, reader)) is not None:
                path.append(Assignment(choice, at[choice], end, module[i].name))
                stack.append(((i + 1, (*at[:choice], end, *at[choice + 1 :])), 0, len(ways)))
    return ways[0] if len(ways) == 1 and steps < _MAX_STEPS else None


def has_equals(names: Iterable[str], trainable: Sequence[NamedTensor]) -> bool:
    """Could another tensor, by its shape, have the place of one of these?"""
    shapes = {one.name: one.tensor.shape for one in trainable}
    counts = Counter(shapes.values())
    return any(counts[shapes[name]] > 1 for name in names)


def by_values(runs: Sequence[NumberedGroup], module: Sequence[NamedTensor]) -> list[Assignment] | None:
    """Where groups keep another order than the module: each master's tensor, told by its first values alone.

    None if a parameter has no master of its own, or two tensors look like it.
    """
    matches = []
    with Reader(check=False) as reader:
        for number, run in enumerate(runs):
            if run.flat is not None or any(slot.master is None for slot in run.slots):
                return None
            for at, slot in enumerate(run.slots):
                alike = [one.name for one in module if slot.fits(one.tensor, reader)]
                if len(alike) != 1:
                    return None
                matches.append(Assignment(number, at, at + 1, alike[0]))
    return matches if len({match.name for match in matches}) == len(matches) else None


def in_order(
    runs: Sequence[NumberedGroup],
    module: Sequence[NamedTensor],
    order: Sequence[str],
    where: Path,
    *,
    skips: bool = True,
) -> list[Assignment]:
    """As the user says: the parameters of all runs, one run after another. Raises `BadRules` where one does not fit.

    Names that the module does not have are those of other ranks. So are those
    that are left at the end, unless `skips`: then the module is this rank's alone.
    """
    tensors = {one.name: one.tensor for one in module}
    names = [name for name in order if name in tensors]
    matches: list[Assignment] = []
    with Reader(check=False) as reader:
        for number, run in enumerate(runs):
            at = 0
            while at < run.end:
                if len(matches) == len(names):
                    raise BadRules(f"the order has too few names for group {number} of the optimizer", where=where)
                name = names[len(matches)]
                end = run.after(at, tensors[name], reader)
                if end is None:
                    raise BadRules(
                        f"the order says that `{printable(name)}` is next in group {number} of the optimizer, but its "
                        f"shape {list(tensors[name].shape)} or its values are not those at {at:,}",
                        where=where,
                    )
                matches.append(Assignment(number, at, end, name))
                at = end
    if skips and len(matches) < len(names):
        left = printable(names[len(matches)])
        raise BadRules(f"the order names `{left}`, but the optimizer has no more parameters", where=where)
    return matches


def _looks(master: Tensor, copy: Tensor, reader: Reader) -> bool:
    """Do the first values of the master round to those of the copy?"""
    if master.shape != copy.shape:
        return False
    for box in slabs(master.shape, _LOOK):
        rounded = Rounded().decode(b"", box.shape, copy.dtype, read(master.crop(box), reader))
        return _bits(read(copy.crop(box), reader)) == _bits(rounded)
    return True


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()
