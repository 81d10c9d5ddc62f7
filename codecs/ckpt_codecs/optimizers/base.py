"""What every optimizer's step is: names of states, and how they follow from a gradient."""

from collections.abc import Mapping
from typing import Protocol

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError

States = Mapping[str, Array]
"""The states of a tensor, or of a range of it, by torch's names: flat float32 arrays of one size."""

WEIGHTS = "param"
"""What the steps call the tensor that they step: the master, where there is one."""
VECTOR = 8
"""Elements that torch's fused kernels for CPUs take at once; what is left at a tensor's end is rounded otherwise."""


class OptimizerStep(Protocol):
    """One step of one parameter group: the options that the optimizer had at that moment."""

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that it needs, the weights first."""

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Step in place.

        Args:
            states: All that `states` names.
            gradients: float32, as the optimizer was given them; as many as there are weights.
            count: The number of this step of this parameter, from 1.
            vectors: How many of the elements lie in whole vectors of the tensor: see `whole_vectors`.

        Raises:
            CodecError: A state is missing or has another size.
        """


def whole_vectors(size: int, start: int, stop: int, is_fused: bool, width: int = VECTOR) -> int:
    """How many elements of the range of a tensor of `size` elements lie in whole vectors of the optimizer's kernel.

    Only torch's fused implementations know vectors; in others all elements are rounded alike. DeepSpeed's operators are
    fused, too, and have vectors of their own `width`. Its blocks, tiles and threads change nothing.

    >>> whole_vectors(21, 8, 21, is_fused=True), whole_vectors(21, 0, 8, is_fused=True)
    (8, 8)
    """
    end = size - size % width if is_fused else size
    return min(max(end - start, 0), stop - start)


def check_count(count: int) -> None:
    """Raise CodecError for what is no number of a step."""
    if count < 1:
        raise CodecError(f"steps are counted from 1: there is no step {count}")


def state_of(states: States, name: str) -> Array:
    """A state by its name. Raises CodecError if it is missing."""
    try:
        return states[name]
    except KeyError:
        raise CodecError(f"a step of this optimizer needs the state `{name}`") from None
