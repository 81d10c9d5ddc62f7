"""Weights that a library stores multiplied by a factor, or with one added, because its model does not compute this.

A weight f * w has the gradient g / f. So the first moment of Adam is divided by f, and the second by the square of f. A
factor that is a power of two changes no bit but those of the exponent: this is checked wherever values are read. Other
factors and sums are rounded in the type of each state, as MaxText's own converter does, and only if the user allows it.
Values that become infinite or zero by this are counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import frexp, sqrt
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Array, Blob, Tensor, read
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.names.expressions import evaluate, parse_expression
from ckpt_formats.names.model import Model, ModelTensor

_WEIGHTS = (MODEL, MASTER)
_POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
"""How often a state of an optimizer is divided by the factor of its weight."""
_HINT = "`allow_rounding` (--names with --allow-rounding) rounds them as MaxText's converter does; bits will differ."


@dataclass(frozen=True)
class Scaling:
    """What a library's weight is of that in transformers: a multiple, or one more."""

    factor: float = 1.0
    is_quotient: bool = False
    """True if the weight is divided by a root, for which the library multiplies by its reciprocal."""
    shift: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether it changes exponents alone."""
        return not self.shift and frexp(self.factor)[0] == 0.5

    def of_state(self, state: str, back: bool) -> "Change":
        """What happens to a state of the weight's parameter; `back`: from the library to transformers."""
        if state in _WEIGHTS:
            divides = back and not self.is_quotient
            factor = 1 / self.factor if back and self.is_quotient else self.factor
            return Change(factor, divides, -self.shift if back else self.shift)
        factor = self.factor ** _POWERS[state]
        return Change(factor if back else 1 / factor, False, 0)


@dataclass(frozen=True)
class Change:
    """What is computed of each value: a product or quotient, then a sum."""

    factor: float
    divides: bool
    shift: int

    def apply(self, values: Array) -> Array:
        """The values, of any shape, computed in float32 (float64: in float64) and rounded to their dtype."""
        wide = np.dtype(np.float64 if values.dtype.itemsize == 8 else np.float32)
        factor, exact = wide.type(self.factor), values.astype(wide)
        with np.errstate(all="ignore"):  # what overflows is infinite, as in casts; exact changes are compared
            result: Array = exact / factor if self.divides else exact * factor
            if self.shift:
                result = result + wide.type(self.shift)
            return result.astype(values.dtype)


@dataclass(frozen=True)
class ChangedBlob(Blob):
    """The values of another blob after a change, in their own type."""

    base: Blob
    change: Change
    name: str
    """The parameter and the state."""
    is_checked: bool
    """Whether no bit may change but those of exponents; else values that overflow or underflow are counted."""
    start: Shape | None = None
    """Where the block begins in the tensor; None: it is all of it."""

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def crop(self, box: Box) -> "ChangedBlob":
        start = box.start if self.start is None else box.shift(self.start).start
        return replace(self, base=self.base.crop(box), start=start)

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)

    def read_into(self, out: Array, reader: Reader) -> None:
        values = read(self.base, reader)
        changed = self.change.apply(values)
        if self.is_checked:
            self._check(values, changed)
        elif not self.change.shift:  # a sum may be zero
            self._count(values, changed, reader)
        np.copyto(out, changed)

    def _check(self, before: Array, after: Array) -> None:
        if Change(1 / self.change.factor, self.change.divides, 0).apply(after).tobytes() != before.tobytes():
            verb = "divided" if self.change.divides else "multiplied"
            raise UnsupportedError(
                f"`{printable(self.name)}` has values that lose bits if they are {verb} by {self.change.factor:g}",
                hint=_HINT,
            )

    def _count(self, before: Array, after: Array, reader: Reader) -> None:
        from ckpt_formats.core.value_changes import changed_by_cast  # an index is made without values

        whole = Box.whole(self.shape)
        place = whole if self.start is None else whole.shift(self.start)
        reader.changes.note(changed_by_cast(self.name, place, before, after))


def scalings(model: Model, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Scaling]:
    """The scalings of a model's tensors by their names in transformers.

    `tables`: for each atom that is scaled, of which number it is multiplied or divided by the root. Norms that add one
    to their weights in transformers do not in the library.
    """
    result: dict[str, Scaling] = {}
    for one in model.stored("hf"):
        if one.is_copy:
            continue
        kinds = {_scaling(model, one, atom, tables.get(atom)) for atom, _, _ in one.keys}
        if kinds == {Scaling()}:
            continue
        (scaling,) = kinds  # scaled tensors have one atom in all families that have any
        result |= dict.fromkeys(one.names, scaling)
    return result


def _scaling(model: Model, one: ModelTensor, atom: str, table: Mapping[str, Any] | None) -> Scaling:
    if table is None:
        return Scaling(shift=1) if "norm" in atom and model.values["norms_add_one"] else Scaling()
    is_quotient = "divided_by_root" in table
    text = table["divided_by_root" if is_quotient else "multiplied_by_root"]
    value = evaluate(parse_expression(text), one.scope)
    if not isinstance(value, int | float) or not 0 < value < 1 << 62:
        raise UnsupportedError(f"`{text}` is {printable(str(value))[:60]}, of which there is no root")
    root = sqrt(value)
    if table.get("type") == "bfloat16":
        root = float(ml_dtypes.bfloat16(root))
    return Scaling(1 / root if is_quotient else root, is_quotient)


def scaled(
    source: Checkpoint, changes: Mapping[str, Scaling], library: str, *, back: bool, allow_rounding: bool
) -> Checkpoint:
    """A checkpoint with transformers' names and the values of a library; `back`: with those of transformers again.

    Notices say what changed, and the result of a job how many values became infinite or zero. Lazy.

    Raises: UnsupportedError for values that would be rounded, unless it is allowed, and for states of which it is not
    known how they depend on the weight. Values that lose bits although the factor is a power of two are refused when
    they are read.
    """
    own = {name: changes[name] for name, one in source.parameters.items() if name in changes and one.role != "extra"}
    if rounded := [name for name, one in own.items() if not one.is_exact and not allow_rounding]:
        reasons = sorted({_reason(own[name]) for name in rounded})
        raise UnsupportedError(
            f"{library} stores {list_names(rounded)} {' or '.join(reasons)}, which rounds",
            where=source.path,
            hint=_HINT,
        )
    parameters = {
        name: _changed(source.parameters[name], one, source, back=back, allow_rounding=allow_rounding)
        for name, one in own.items()
    }
    return replace(
        source,
        parameters={**source.parameters, **parameters},
        notices=(*source.notices, *_notices(source, own, library, back=back, allow_rounding=allow_rounding)),
    )


def _changed(
    parameter: Parameter, scaling: Scaling, source: Checkpoint, *, back: bool, allow_rounding: bool
) -> Parameter:
    states = {}
    for state, tensor in parameter.states.items():
        if state == "step" and tensor.shape == ():
            states[state] = tensor
            continue
        title = f"{parameter.name} ({state})"
        if state not in _WEIGHTS and state not in _POWERS:
            raise UnsupportedError(
                f"how `{printable(title)}` depends on its weight, which is scaled, is not known",
                where=source.path,
                hint="Leave the optimizer states out with --model-only.",
            )
        if not is_float(tensor.dtype):
            raise UnsupportedError(f"`{printable(title)}` is {tensor.dtype.name}: only numbers can be scaled")
        change = scaling.of_state(state, back)
        is_same = (change.factor, change.shift) == (1, 0)
        states[state] = tensor if is_same else Tensor.of(ChangedBlob(tensor, change, title, not allow_rounding))
    return replace(parameter, states=states)


def _notices(
    source: Checkpoint, own: Mapping[str, Scaling], library: str, *, back: bool, allow_rounding: bool
) -> Iterator[Notice]:
    for scaling in dict.fromkeys(own.values()):
        names = tuple(name for name, one in own.items() if one == scaling)
        text = f"{library} stores them {_reason(scaling)}"
        if scaling.is_exact:
            others = "but values that become denormal are rounded" if allow_rounding else "and no other bit"
            yield Notice(f"weights whose exponents change, {others}: {text}", names)
        else:
            yield Notice(f"weights that are rounded: {text}", names, Weight.UNSURE)
        moments = any(set(_POWERS) & source.parameters[name].states.keys() for name in names)
        if moments and scaling.factor != 1:
            rate = 1 / scaling.factor if back else scaling.factor
            programs = f"torch's AdamW goes on as {library}'s" if back else f"{library}'s AdamW goes on as torch's"
            yield Notice(
                f"an optimizer changes scaled weights at another rate: {programs} did if the learning rate of these "
                f"is multiplied by {rate:g}, and epsilon and weight decay are divided by it",
                names,
                Weight.UNSURE,
            )


def _reason(scaling: Scaling) -> str:
    if scaling.shift:
        return "with one added"
    root = 1 / scaling.factor if scaling.is_quotient else scaling.factor
    return f"{'divided' if scaling.is_quotient else 'multiplied'} by {root:g}"
