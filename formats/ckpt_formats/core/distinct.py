"""The values that an array has, each once."""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

T = TypeVar("T", bound=np.generic)


def distinct(values: "npt.NDArray[T]") -> "npt.NDArray[T]":
    """The values of an array of integers, (n,) of any integer type, sorted, each once: (m,), m <= n.

    As `numpy.unique`, whose first call imports `numpy.ma`: a tenth of the time in which a command starts.
    """
    ordered = np.sort(values, axis=None)
    return ordered[_begins(ordered)]


def distinct_counts(values: "npt.NDArray[T]") -> "tuple[npt.NDArray[T], npt.NDArray[np.intp]]":
    """The values of an array of integers as `distinct` returns them, and how often each occurs: both (m,)."""
    ordered = np.sort(values, axis=None)
    first = np.flatnonzero(_begins(ordered))
    return ordered[first], np.diff(first, append=len(ordered))


def _begins(ordered: "npt.NDArray[Any]") -> "npt.NDArray[np.bool_]":
    """Where sorted values, (n,), differ from the one before: (n,)."""
    begins = np.ones(len(ordered), np.bool_)
    begins[1:] = ordered[1:] != ordered[:-1]
    return begins
