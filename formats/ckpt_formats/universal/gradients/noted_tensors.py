"""Tensors in the notes of a step, which are tensors of the restored checkpoint.

The recorder writes a tensor as a call of `torch.Tensor` with its values, because an array that a run notes is to come
back as an array.
"""

from collections.abc import MutableMapping
from itertools import chain, count

import numpy as np

from ckpt_formats.core.checkpoint import MODEL, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor
from ckpt_formats.core.values import Global, Record, TensorName, Value

_TENSOR = Global("torch", "Tensor")


def noted_tensor(values: Array) -> Record:
    """A tensor as a value of a note. `values`: any shape, of any dtype in `DTYPES`."""
    return Record(_TENSOR, (values,))


def names_for_noted_tensors(note: Value, place: str, parameters: MutableMapping[str, Parameter]) -> Value:
    """The note with a `TensorName` in the place of every tensor.

    Adds the tensors to `parameters`, with the role `extra`, each under its place, such as `scheduler/rates`.
    """
    if isinstance(note, dict):
        return {key: names_for_noted_tensors(value, f"{place}/{key}", parameters) for key, value in note.items()}
    if type(note) in (list, tuple):
        return type(note)(names_for_noted_tensors(value, f"{place}/{i}", parameters) for i, value in enumerate(note))
    if not isinstance(note, Record) or note.cls != _TENSOR or len(note.args) != 1:
        return note
    (array,) = note.args
    if not isinstance(array, np.ndarray) or array.dtype.name not in DTYPES:
        return note
    name = next(name for name in chain((place,), (f"{place}~{i}" for i in count(1))) if name not in parameters)
    parameters[name] = Parameter(name, "extra", {MODEL: Tensor.of(ArrayBlob(array))})
    return TensorName(name)
