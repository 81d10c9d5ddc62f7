"""Our tensors held against those of torch."""

import numpy as np
import torch

from ckpt_formats.core.tensor import Array, Tensor, read


def as_torch(array: Array) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def same(tensor: Tensor, expected: torch.Tensor) -> bool:
    got = as_torch(read(tensor))
    return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)
