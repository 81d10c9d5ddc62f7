"""Values of a checkpoint other than parameters, as the run's own objects take them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.reading import Reading
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Global, TensorName, Value
from ckpt_training.composite_tensors import from_value


@dataclass(frozen=True)
class PlainValues:
    """Gives the values of a checkpoint: its tensors become tensors of torch, everything else stays plain data."""

    source: Checkpoint

    def of(self, value: Value) -> Any:
        """A value with its tensors, on the CPU. Raises `CorruptError` if it refers to a tensor that is missing."""
        if isinstance(value, TensorName):
            stored = self.source.parameters.get(value.name)
            if stored is None:
                raise CorruptError(
                    f"a value refers to the tensor `{value.name}`, which is missing", where=self.source.path
                )
            self._verify(stored.weight)
            return stored.weight.torch()
        if isinstance(value, Global):
            dtype = getattr(torch, value.name, None) if value.module == "torch" else None
            return dtype if isinstance(dtype, torch.dtype) else value
        if type(value) is dict:
            return from_value({key: self.of(one) for key, one in value.items()})
        return type(value)(map(self.of, value)) if type(value) in (list, tuple) else value

    def _verify(self, tensor: Tensor) -> None:
        """Raise `CorruptError` if a checksum does not match. Such tensors are small: they are read twice."""
        with Reading(self.source) as reading:
            reading.fill([(tensor, np.empty(tensor.shape, tensor.dtype))])
            reading.verify()
