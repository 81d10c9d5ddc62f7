"""Matches the parameters that an optimizer numbers to the model's tensors.

PyTorch's optimizers store states by number, without names. But each group lists
its parameters in the order of the module, so the module's order is a merge of
the groups' orders. Shapes and, if there is a master, its first values determine
the group of each tensor. If several assignments are possible, `only_assignment`
returns none.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from ckpt_formats.core.errors import RulesError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape, slabs
from ckpt_formats.core.rounded import is_rounded
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.text import printable

BY_ORDER = (
    "numbered states were matched in the order of the model's tensors, because their shapes allow several orders. "
    "Give --param-order if this optimizer has another one"
)
"""The notice if only the order decided."""
_FIRST_VALUES = 64
_MAX_STEPS = 2_000_000
_GROUPS_OF_A_STEP = 64
"""A step of the search with more groups than these counts as several: it copies a place in each."""


@dataclass(slots=True)  # not frozen, like the tensor
class NamedTensor:
    """A tensor of the model, and its name."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class NumberedParameter:
    """A numbered parameter: its master, if there is one, and the shapes of its states."""

    master: Tensor | None
    state_shapes: Mapping[str, Shape]

    def fits(self, tensor: Tensor, reader: Reader) -> bool:
        """Whether it can be this tensor: by the first values of its master, else by the shapes of its states."""
        if self.master is not None:
            return first_values_match(self.master, tensor, reader)
        return all(is_state_of(name, shape, tensor.shape) for name, shape in self.state_shapes.items())


@lru_cache(1 << 12)
def is_state_of(state: str, shape: Shape, tensor_shape: Shape) -> bool:
    """Whether a parameter of shape `tensor_shape` can have a state of this name and shape.

    Factored second moments (Adafactor, Shazeer and Stern 2018; CAME) are means over the rows or the columns:
    `row_var`, `col_var`, `exp_avg_sq_row`, `exp_avg_sq_col`. PyTorch's own keep the reduced axis with length 1.
    """
    words = state.split("_")
    if "row" in words and len(tensor_shape) > 1:
        return shape in (tensor_shape[:-1], (*tensor_shape[:-1], 1))
    if "col" in words and len(tensor_shape) > 1:
        return shape in ((*tensor_shape[:-2], tensor_shape[-1]), (*tensor_shape[:-2], 1, tensor_shape[-1]))
    return shape == tensor_shape


@dataclass(frozen=True)
class NumberedGroup:
    """The parameters of one group in order: separate, or concatenated in a flat master."""

    parameters: tuple[NumberedParameter, ...] = ()
    flat: FileBlob | None = None

    @property
    def end(self) -> int:
        """The length of the group, in parameters or in elements of the flat master."""
        return len(self.parameters) if self.flat is None else self.flat.shape[0]

    def after(self, at: int, tensor: Tensor, reader: Reader) -> int | None:
        """The position after this tensor if it can be next in the group; else None."""
        end = at + (1 if self.flat is None else prod(tensor.shape))
        if end > self.end:
            return None
        if self.flat is None:
            return end if self.parameters[at].fits(tensor, reader) else None
        master = Tensor.of(self.flat.flat(at, end).shaped(tensor.shape))
        return end if first_values_match(master, tensor, reader) else None


@dataclass(slots=True)  # not frozen, like tensors: there is one for each
class Assignment:
    """The position of a tensor in a group, in parameters or in elements."""

    group: int
    start: int
    stop: int
    name: str


Place = tuple[int, tuple[int, ...]]
"""The state of the search: the position in the module, and in each group."""


def only_assignment(
    groups: Sequence[NumberedGroup], module: Sequence[NamedTensor], *, skips: bool = True
) -> list[Assignment] | None:
    """The only way in which the module's order is a merge of the groups; None if there is none, or several.

    With `skips`, tensors that are frozen or buffers may be skipped. Without it, no
    tensor before the last assigned one is skipped.
    """
    if len(groups) == 1 and groups[0].flat is None and groups[0].end == len(module):
        return _one_to_one(groups[0], module)
    solutions: list[list[Assignment]] = []
    dead_ends: set[Place] = set()
    path: list[Assignment | None] = []
    # Depth first, with an explicit stack of: a place, what is left of all groups there in parameters and in elements
    # of flat masters, the next choice to try, the number of solutions before it.
    left = (
        sum(group.end for group in groups if group.flat is None),
        sum(group.end for group in groups if group.flat is not None),
    )
    stack: list[tuple[Place, tuple[int, int], int, int]] = [((0, (0,) * len(groups)), left, 0, 0)]
    choices = len(groups) + skips
    visited, cost = 0, 1 + len(groups) // _GROUPS_OF_A_STEP
    with Reader(check=False) as reader:
        while stack and len(solutions) < 2 and visited < _MAX_STEPS:
            place, left, choice, known_count = stack.pop()
            i, at = place
            visited += cost
            ended = choice == 0 and left == (0, 0)
            if ended:
                solutions.append([match for match in path if match is not None])
            # Without this check, all pairs of equal layers of a deep model would be tried.
            late = choice == 0 and left[0] > len(module) - i
            if ended or late or i == len(module) or choice == choices or (choice == 0 and place in dead_ends):
                if len(solutions) == known_count:
                    dead_ends.add(place)
                if path:
                    path.pop()
                continue
            stack.append((place, left, choice + 1, known_count))
            if choice == len(groups):
                path.append(None)
                stack.append(((i + 1, at), left, 0, len(solutions)))
            elif (end := groups[choice].after(at[choice], module[i].tensor, reader)) is not None:
                path.append(Assignment(choice, at[choice], end, module[i].name))
                taken, (parameters, elements) = end - at[choice], left
                rest = (parameters - taken, elements) if groups[choice].flat is None else (parameters, elements - taken)
                stack.append(((i + 1, (*at[:choice], end, *at[choice + 1 :])), rest, 0, len(solutions)))
    return solutions[0] if len(solutions) == 1 and visited < _MAX_STEPS else None


def _one_to_one(group: NumberedGroup, module: Sequence[NamedTensor]) -> list[Assignment] | None:
    """The assignment of as many parameters as there are tensors, none of which can be skipped; None if one fits not."""
    known: dict[tuple[int, Shape], bool] = {}  # by the id of a parameter without a master, since many are one object
    with Reader(check=False) as reader:
        for parameter, one in zip(group.parameters, module, strict=True):
            key = id(parameter), one.tensor.shape
            fits = known.get(key)
            if fits is None:
                fits = parameter.fits(one.tensor, reader)
                if parameter.master is None:
                    known[key] = fits
            if not fits:
                return None
    return [Assignment(0, at, at + 1, one.name) for at, one in enumerate(module)]


def has_equals(names: Iterable[str], trainable: Sequence[NamedTensor]) -> bool:
    """Whether one of these tensors has the same shape as another trainable tensor."""
    shapes = {one.name: one.tensor.shape for one in trainable}
    counts = Counter(shapes.values())
    return any(counts[shapes[name]] > 1 for name in names)


def by_values(groups: Sequence[NumberedGroup], module: Sequence[NamedTensor]) -> list[Assignment] | None:
    """An assignment by the first values of each master alone, for groups in another order than the module.

    None if a parameter has no master of its own, or if several tensors match a master.
    """
    matches = []
    with Reader(check=False) as reader:
        for number, group in enumerate(groups):
            if group.flat is not None or any(parameter.master is None for parameter in group.parameters):
                return None
            for at, parameter in enumerate(group.parameters):
                candidates = [one.name for one in module if parameter.fits(one.tensor, reader)]
                if len(candidates) != 1:
                    return None
                matches.append(Assignment(number, at, at + 1, candidates[0]))
    return matches if len({match.name for match in matches}) == len(matches) else None


def in_order(
    groups: Sequence[NumberedGroup],
    module: Sequence[NamedTensor],
    order: Sequence[str],
    where: Path,
    *,
    skips: bool = True,
) -> list[Assignment]:
    """An assignment in the order that the user gives: the parameters of all groups, one group after another.

    Names that the module does not have belong to other ranks, and so do names after the last parameter,
    unless `skips` is true. Raises `RulesError` if a name, a shape or values do not fit.
    """
    tensors = {one.name: one.tensor for one in module}
    names = [name for name in order if name in tensors]
    matches: list[Assignment] = []
    with Reader(check=False) as reader:
        for number, group in enumerate(groups):
            at = 0
            while at < group.end:
                if len(matches) == len(names):
                    raise RulesError(f"the order has too few names for group {number} of the optimizer", where=where)
                name = names[len(matches)]
                end = group.after(at, tensors[name], reader)
                if end is None:
                    raise RulesError(
                        f"by the order, `{printable(name)}` is next in group {number} of the optimizer, but "
                        f"its shape {list(tensors[name].shape)} or its values are not those at {at:,}",
                        where=where,
                    )
                matches.append(Assignment(number, at, end, name))
                at = end
    if skips and len(matches) < len(names):
        unused = printable(names[len(matches)])
        raise RulesError(f"the order names `{unused}`, but the optimizer has no more parameters", where=where)
    return matches


def first_values_match(master: Tensor, copy: Tensor, reader: Reader) -> bool:
    """Whether the first values of the master, rounded, equal those of the copy."""
    if master.shape != copy.shape:
        return False
    for box in slabs(master.shape, _FIRST_VALUES):
        return is_rounded(copy.crop(box), master.crop(box), reader)
    return True
