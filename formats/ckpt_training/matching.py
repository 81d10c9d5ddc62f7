"""Which stored values each local shard gets: by its name, its state and its dtype. No tensor data is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.quantised.weights import parts_of, quantised_weights
from ckpt_formats.core.tensor import Fragment, Tensor, ZeroBlob, from_fragments, with_replicas
from ckpt_training.local_shards import LocalPart, dtype_name
from ckpt_training.mismatches import Mismatches

Rounding = Literal["weights", "none", "all"]
"""What may be rounded to the dtype of the memory: weights, nothing, or also the optimizer's states."""


@dataclass(frozen=True)
class Matching:
    """Finds the stored values of a model's tensors, and notes what does not fit."""

    source: Checkpoint
    ties: Mapping[str, tuple[str, ...]]
    """The names of the model's tied tensors, each with all others of the same memory."""
    rounding: Rounding = "weights"
    vocab_rows: int | None = None
    """The number of rows of a vocabulary; in tables that have more, the rest is padding."""
    mismatches: Mismatches = field(default_factory=Mismatches)
    used: set[str] = field(default_factory=set)
    """The names of the stored parameters that were matched."""

    @cached_property
    def _codes(self) -> frozenset[str]:
        """The stored parameters that are codes, scales or the like of quantised weights."""
        return frozenset(parts_of(quantised_weights(self.source)))

    def parameters(self, name: str) -> list[Parameter]:
        """The stored parameters of a tensor of the model: several if the model ties what the checkpoint does not."""
        stored: dict[str, Parameter] = {}
        for one in (name, *self.ties.get(name, ())):
            parameter = self.source.parameters.get(self.source.aliases.get(one, one))
            if parameter is not None and parameter.role != "extra":
                stored.setdefault(parameter.name, parameter)
        self.used.update(stored)
        return list(stored.values())

    def values(self, part: LocalPart, state: str, dtype: torch.dtype) -> Tensor | None:
        """The stored values for a part of a state: of the block's shape if the part is a block, else a vector.

        None if something does not fit, which is noted then. Raises `UnsupportedError` for a dtype that no file has.
        """
        label = part.name if state == MODEL else f"{part.name} ({state})"
        wanted = _dtype(dtype, label)
        stored = [one for each in self.parameters(part.name) if (one := _chosen(each, state, wanted)) is not None]
        if not stored:
            self.mismatches.missing[label] = None
            return None
        if any(one.shape != stored[0].shape or one.dtype != stored[0].dtype for one in stored):
            self.mismatches.shapes[label] = f"the model ties it, but `{self.source.path.name}` has tensors that differ"
            return None
        # The model has one tensor of what the checkpoint has several: they are compared when they are read.
        tensor = (
            self._padded(with_replicas(stored), part.shape) if len(stored) > 1 else self._padded(stored[0], part.shape)
        )
        if tensor.shape != part.shape:
            self.mismatches.shapes[label] = f"{list(tensor.shape)} in the checkpoint, {list(part.shape)} in the model"
            return None
        if tensor.dtype != wanted and any(one.name in self._codes for one in self.parameters(part.name)):
            self.mismatches.codes[label] = f"{tensor.dtype.name} to {wanted.name}"
            return None
        if not self.may_have(label, state, tensor.dtype, wanted):
            return None
        block = tensor.crop(part.box)
        return block if part.is_block else block.flat[part.start : part.stop]

    def _padded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor with as many rows of padding as `shape` has, if both have all rows of the vocabulary."""
        rows = self.vocab_rows
        if rows is None or not shape or len(tensor.shape) != len(shape) or tensor.shape[1:] != shape[1:]:
            return tensor
        if tensor.shape[0] == shape[0] or min(tensor.shape[0], shape[0]) < rows:
            return tensor
        common = Box((0,) * len(shape), (min(tensor.shape[0], shape[0]), *shape[1:]))
        rest = Box((common.stop[0], *common.start[1:]), shape)
        padding = [Fragment(rest, ZeroBlob(rest.shape, tensor.dtype))] if rest.size else []
        return from_fragments(shape, [*tensor.placed(common, common), *padding], tensor.dtype)

    def may_have(self, label: str, state: str, stored: DType, wanted: DType) -> bool:
        """Whether values of one dtype may become values of another, which is noted."""
        if stored == wanted:
            return True
        text = f"{stored.name} to {wanted.name}"
        is_exact = np.can_cast(stored, wanted, "safe")
        is_weight = state in (MODEL, MASTER)
        may_round = self.rounding == "all" or (is_weight and self.rounding == "weights")
        if is_exact or (may_round and _is_floating(stored) and _is_floating(wanted)):
            self.mismatches.cast[label] = text
            return True
        self.mismatches.refused[label] = text
        return False


def _chosen(parameter: Parameter, state: str, dtype: DType) -> Tensor | None:
    """The stored values for a state.

    For the model's copy: a stored weight of its own dtype, else the master, else the stored copy of the model. For a
    master: the master, else the weight. For any other: the state of its name.
    """
    states = parameter.states
    if state == MODEL:
        equal = (states[name] for name in (MODEL, MASTER) if name in states and states[name].dtype == dtype)
        return next(equal, states.get(MASTER, parameter.weight))
    return states.get(MASTER, parameter.weight) if state == MASTER else states.get(state)


def _dtype(dtype: torch.dtype, label: str) -> DType:
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise UnsupportedError(f"`{label}` is of type {name}, of which no checkpoint has values")
    return DTYPES[name]


def _is_floating(dtype: DType) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))
