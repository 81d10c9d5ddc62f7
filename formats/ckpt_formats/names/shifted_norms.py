"""Norms that one library multiplies by w, and another by 1 + w: their weights are shifted by one, in float32.

Their gradients are the same, so moments of gradients stay as they are. Other states may follow the weights, and are
refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Array, Blob, Tensor, read
from ckpt_formats.core.text import printable

_SUFFIX = "norm.weight"
"""How the names of norms end, in transformers and in llama.cpp."""
_WEIGHTS = (MODEL, MASTER)
_OF_GRADIENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"})
"""States of optimizers that are computed from gradients alone."""


@dataclass(frozen=True)
class ShiftedBlob(Blob):
    """The values of another blob plus a number, added and rounded in float32."""

    base: Blob
    shift: int

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> DType:
        return DTYPES["float32"]

    def crop(self, box: Box) -> "ShiftedBlob":
        return ShiftedBlob(self.base.crop(box), self.shift)

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)

    def read_into(self, out: Array, reader: Reader) -> None:
        np.add(read(self.base, reader).astype(np.float32), np.float32(self.shift), out=out)


def with_shifted_norms(source: Checkpoint, shift: int) -> Checkpoint:
    """A checkpoint with `shift` (1 or -1) added to the weights of all norms, which become float32. A notice names them.

    Raises `UnsupportedError` for norms with states that may follow their weights.
    """
    shifted = dict(_shifted(source, shift))
    text = f"norms have {shift:+d} added to their weights, rounded to float32: llama.cpp multiplies by w, not by 1 + w"
    notices = (Notice(text, tuple(shifted), Weight.UNSURE),) if shifted else ()
    return replace(source, parameters={**source.parameters, **shifted}, notices=(*source.notices, *notices))


def _shifted(source: Checkpoint, shift: int) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in source.parameters.items():
        if parameter.role == "extra" or not name.endswith(_SUFFIX):
            continue
        if strange := [state for state in parameter.states if state not in _OF_GRADIENTS.union(_WEIGHTS)]:
            raise UnsupportedError(
                f"`{printable(name)}` has the state {printable(strange[0])}, which may follow its weight: the weight "
                "is shifted by one for the target's names, and how the state changes is not known",
                where=source.path,
                hint="Leave the optimizer states out with --model-only.",
            )
        states = {
            state: Tensor.of(ShiftedBlob(tensor, shift)) if state in _WEIGHTS else tensor
            for state, tensor in parameter.states.items()
        }
        yield name, replace(parameter, states=states)
