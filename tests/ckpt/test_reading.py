"""`ckpt.Reading`: blocks of checkpoints of all kinds come into given memory, and what was read is verified."""

from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.types import Tensor
from damage import SAMPLES

SOURCES = {
    "zero": SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen",
    "dcp": SAMPLES / "dcp-2.13-fsdp2-w2-tp2-tied-frozen",
    "megatron": SAMPLES / "megatron-0.16-tp2-pp2-dist",
    "hf": SAMPLES / "transformers-5.23-trainer",
    "coded": SAMPLES / "universal-1-coded",
    "deltas": SAMPLES / "universal-1-delta",
    "log": SAMPLES / "recorded-1",
}
every_source = pytest.mark.parametrize("path", SOURCES.values(), ids=SOURCES.keys())


def _parts(tensor: Tensor) -> list[tuple[Tensor, np.ndarray]]:
    """Parts of a tensor, each with an array of its shape, some of them not contiguous."""
    parts = [tensor, tensor.flat[tensor.size // 3 : tensor.size - tensor.size // 5]]
    if tensor.shape:
        half = tensor.shape[-1] // 2
        parts += [tensor.block[..., half:], tensor.block[: tensor.shape[0] // 2 + 1]]
    pairs = [(part, np.zeros(part.shape, part.dtype)) for part in parts]
    return [*pairs, (tensor, np.zeros(tensor.shape[::-1], tensor.dtype).T)]


def _expected(tensor: Tensor) -> list[np.ndarray]:
    """The values of `_parts`, from one read of all values."""
    values = np.asarray(tensor)
    wanted = [values, values.reshape(-1)[values.size // 3 : values.size - values.size // 5]]
    if tensor.shape:
        wanted += [values[..., tensor.shape[-1] // 2 :], values[: tensor.shape[0] // 2 + 1]]
    return [*wanted, values]


@every_source
def test_parts_of_all_states_come_into_given_memory(path: Path) -> None:
    run = ckpt.open(path)
    tensors = [tensor for _, _, tensor in run.tensors()]
    pairs = [pair for tensor in tensors for pair in _parts(tensor)]
    with ckpt.Reading(run, resources=ckpt.Resources(workers=2)) as reading:
        reading.fill(pairs)
        reading.verify()
    expected = [values for tensor in tensors for values in _expected(tensor)]
    for (part, array), values in zip(pairs, expected, strict=True):
        assert array.tobytes() == values.tobytes(), part
