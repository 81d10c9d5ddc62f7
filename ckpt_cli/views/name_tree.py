"""The tree of names of a checkpoint, a line each. Layers of the same form are one line, such as `{0..11}`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt_formats.core.state_table import ROLES, StateTable
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.core.values import brief

Nested = dict[str, Any]
"""Children by name: of the same kind, or the number of a parameter."""


def lines(states: StateTable, depth: int | None = None) -> Iterator[str]:
    """The lines for all parameters that are no extras, folded below `depth`."""
    extra = ROLES.index("extra")
    numbers = np.flatnonzero(states.role != extra).tolist()
    yield from _Tree(states, depth).lines(_nested(states, numbers), 0)


def tensors(count: int) -> str:
    return f"{count} tensor" if count == 1 else f"{count} tensors"


def _nested(states: StateTable, numbers: list[int]) -> Nested:
    root: Nested = {}
    names = states.names
    for number in numbers:
        here, *rest = names[number].split(".")
        node = root
        for part in rest:
            child = node.setdefault(here, {})
            if not isinstance(child, dict):  # the name of a tensor is a prefix of longer names
                here = f"{here}.{part}"
                continue
            node, here = child, part
        node[here] = number
    return root


class _Tree:
    """What the lines say of the parameters, and which parts of the tree are alike."""

    def __init__(self, states: StateTable, depth: int | None) -> None:
        self._states = states
        self._depth = depth
        self._nbytes: Array = states.of_parameters(states.nbytes)
        self._summaries: dict[str, int] = {}
        of_form: list[int] = []
        self._summary: list[int] = []
        """The number of each parameter's summary."""
        for form, number in states.forms():
            if form == len(of_form):
                of_form.append(self._summaries.setdefault(_summary(states, number), len(self._summaries)))
            self._summary.append(of_form[form])
        self._texts = list(self._summaries)
        self._forms: dict[Any, int] = {}
        self._form_of: dict[int, int] = {}

    def lines(self, node: Nested, level: int) -> Iterator[str]:
        indent = "  " * level
        for label, child in self._folded(node):
            while isinstance(child, dict) and len(child) == 1:
                ((inner, child),) = child.items()
                label = f"{label}.{inner}"
            if isinstance(child, int):
                yield f"{indent}{printable(label)}  {self._leaf(child)}"
            elif self._depth is not None and level + 1 >= self._depth:
                leaves = list(_leaves(child))
                nbytes = format_nbytes(int(self._nbytes[leaves].sum()))
                yield f"{indent}{printable(label)}  … {tensors(len(leaves))}, {nbytes}"
            else:
                yield f"{indent}{printable(label)}"
                yield from self.lines(child, level + 1)

    def _folded(self, node: Nested) -> Iterator[tuple[str, Any]]:
        """The children; consecutive numbered ones of the same form are one item."""
        run: list[str] = []
        items: list[tuple[str, Any]] = [*_in_order(node), ("", None)]
        for i, (label, child) in enumerate(items):
            if (
                run
                and _is_number(label)
                and isinstance(child, dict)
                and self._form(child) == self._form(items[i - 1][1])
            ):
                run.append(label)
                continue
            if run:
                yield (run[0] if len(run) == 1 else f"{{{run[0]}..{run[-1]}}} ({len(run)} alike)"), node[run[0]]
                run = []
            if _is_number(label) and isinstance(child, dict):
                run = [label]
            elif child is not None:
                yield label, child

    def _form(self, node: Nested | int) -> int:
        """A number that is equal for equal forms. Each node is looked at once."""
        if isinstance(node, int):
            return self._forms.setdefault(self._summary[node], len(self._forms))
        form = self._form_of.get(id(node))
        if form is None:
            key = tuple((label, self._form(child)) for label, child in node.items())
            form = self._form_of[id(node)] = self._forms.setdefault(key, len(self._forms))
        return form

    def _leaf(self, number: int) -> str:
        states = self._states
        blocks = int(states.fragments[states.first[number] : states.first[number + 1]].max())
        return self._texts[self._summary[number]] + (f"  in {blocks} blocks" if blocks > 1 else "")


def _in_order(node: Nested) -> list[tuple[str, Any]]:
    """The children in their order, except that those with numbers as names are sorted among each other."""
    numbered = iter(sorted((item for item in node.items() if _is_number(item[0])), key=lambda item: int(item[0])))
    return [next(numbered) if _is_number(label) else (label, child) for label, child in node.items()]


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdecimal() and len(label) < 19


def _summary(states: StateTable, number: int) -> str:
    """The type and shape of a parameter's weight, its other states and its values."""
    weight = int(states.weight[number])
    others = [row for row in range(int(states.first[number]), int(states.first[number + 1])) if row != weight]
    dtypes = [dtype.name for dtype in states.dtypes]
    named = " ".join(f"{states.states[int(states.state[row])]}:{dtypes[int(states.dtype[row])]}" for row in others)
    values = " ".join(f"{key}={brief(value)}" for key, value in states.values[int(states.value[number])].items())
    role = ROLES[int(states.role[number])]
    note = "" if role == "parameter" else f" ({role})"
    own = f"{list(states.shape(weight))} {dtypes[int(states.dtype[weight])]}{note}"
    return printable("  ".join(part for part in (own, named, values) if part))


def _leaves(node: Nested) -> Iterator[int]:
    for child in node.values():
        if isinstance(child, int):
            yield child
        else:
            yield from _leaves(child)
