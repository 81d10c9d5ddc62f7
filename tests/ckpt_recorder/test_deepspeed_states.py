"""States of DeepSpeed's optimizers whose elements are in another order than those of the partition."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ckpt_formats.core.geometry import Box
from ckpt_training.engines.deepspeed import momentum_of_partition, parts_of_momentum
from ckpt_training.engines.run import TrackedRun, TrackedTensor
from ckpt_training.local_shards import LocalPart
from ckpt_training.run_shards import states_of


def test_momentum_of_muon_has_the_elements_of_the_partition() -> None:
    """The partition begins with the last two elements of `a`, of which DeepSpeed has the momentum in full."""
    parts = (
        LocalPart("a", (2, 3), "bfloat16", Box.whole((2, 3)), 4, 6, 0),
        LocalPart("b", (4,), "bfloat16", Box.whole((4,)), 0, 4, 2),
    )
    vector, momentum_of_all = torch.zeros(8), torch.arange(10.0)
    optimizer = torch.optim.SGD([vector])
    optimizer.state[vector] = {"momentum_buffer": momentum_of_all}
    run = TrackedRun(nn.Module(), (optimizer,), (TrackedTensor(vector, 0, 0, parts),), (), {})
    run = replace(run, state_parts=partial(parts_of_momentum, run))
    shards = {shard.name: shard.memory for shard in states_of(run, 0)}
    assert {name: memory.tolist() for name, memory in shards.items()} == {"a": [4, 5], "b": [6, 7, 8, 9]}
    momentum = momentum_of_partition(run, 0, "momentum_buffer", torch.arange(10.0))
    assert momentum.tolist() == [4, 5, 6, 7, 8, 9, 0, 0]
    assert momentum_of_partition(run, 0, "exp_avg", torch.arange(10.0)).numel() == 10
