"""States of DeepSpeed's optimizers whose elements are in another order than those of the partition."""

import torch
from torch import nn

from ckpt_formats.core.geometry import Box
from ckpt_training.engines.deepspeed import _momentum_of_partition
from ckpt_training.engines.run import TrackedRun, TrackedTensor
from ckpt_training.local_shards import LocalPart


def test_momentum_of_muon_has_the_elements_of_the_partition() -> None:
    """The partition begins with the last two elements of `a`, of which DeepSpeed has the momentum in full."""
    parts = (
        LocalPart("a", (2, 3), "bfloat16", Box.whole((2, 3)), 4, 6, 0),
        LocalPart("b", (4,), "bfloat16", Box.whole((4,)), 0, 4, 2),
    )
    run = TrackedRun(nn.Module(), (), (TrackedTensor(torch.zeros(8), 0, 0, parts),), (), {})
    momentum = _momentum_of_partition(run, 0, "momentum_buffer", torch.arange(10.0))
    assert momentum.tolist() == [4, 5, 6, 7, 8, 9, 0, 0]
    assert _momentum_of_partition(run, 0, "exp_avg", torch.arange(10.0)).numel() == 10
