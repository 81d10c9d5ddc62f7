"""The interface of optimizer steps: the names of the states, and their update by a gradient."""

from collections.abc import Mapping
from typing import Protocol

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError

States = Mapping[str, Array]
"""The states of a tensor, or of a range of it, by torch's names: (n,) float32 each."""

WEIGHTS = "param"
"""The name of the tensor that is updated: the master, if there is one."""
MAX_COUNT = 1 << 24
"""The largest count of steps where each step must be computed from the one before: torch counts in float32 up to it."""
VECTOR = 8
"""Elements in a vector of torch's fused kernels for CPUs. The rest of a tensor is rounded differently."""


class OptimizerStep(Protocol):
    """One step of one parameter group, with the optimizer's options at this step."""

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that the step needs, the weights first."""

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Update the states in place.

        Args:
            states: The arrays of all names in `self.states`: (n,) float32 each.
            gradients: (n,) float32, as the optimizer received them.
            count: The number of this step of this parameter, from 1.
            vectors: How many of the n elements are in whole vectors of the tensor: see `whole_vectors`.

        Raises:
            CodecError: A state is missing or has another size.
        """


def whole_vectors(size: int, start: int, stop: int, is_fused: bool, width: int = VECTOR) -> int:
    """Return how many elements of a range of a tensor of `size` elements are in whole vectors of the kernel.

    Only torch's fused implementations have vectors; the others round all elements in the same way. DeepSpeed's
    operators are also fused and have another `width`. Its blocks, tiles and threads do not change the result.

    >>> whole_vectors(21, 8, 21, is_fused=True), whole_vectors(21, 0, 8, is_fused=True)
    (8, 8)
    """
    end = size - size % width if is_fused else size
    return min(max(end - start, 0), stop - start)


def check_count(count: int) -> None:
    """Raise CodecError if this is not the number of a step."""
    if count < 1:
        raise CodecError(f"steps are counted from 1: there is no step {count}")


def check_steps(steps: int) -> None:
    """Raise CodecError if there are too many steps to compute a number of each from the one before.

    Counts come from files, so they bound neither memory nor time by themselves.
    """
    if steps > MAX_COUNT:
        raise CodecError(f"{steps:,} steps are more than {MAX_COUNT:,}, up to which their factors are computed")


def state_of(states: States, name: str) -> Array:
    """Return a state by its name: (n,) float32. Raises CodecError if it is missing."""
    try:
        return states[name]
    except KeyError:
        raise CodecError(f"a step of this optimizer needs the state `{name}`") from None
