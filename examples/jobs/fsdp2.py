"""Save FSDP2 while it trains: `torchrun --nproc-per-node 2 fsdp2.py run.chain`.

Go on from any save, on any number of ranks: `torchrun --nproc-per-node 3 fsdp2.py later.chain run.chain@6`.
"""

import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from ckpt_training import Saver, load

target, source = sys.argv[1], sys.argv[2:]
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(1)
model = fully_shard(nn.Sequential(nn.Linear(16, 51), nn.GELU(), nn.Linear(51, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
first = 0
if source:
    first = load(source[0], model, optimizer).step

data = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(2))
with Saver(model, optimizer, target) as saver:  # each rank writes its shards
    for step in range(first, 12):
        mine = data[step].chunk(world)[rank]
        loss = nn.functional.mse_loss(model(mine).squeeze(-1), mine.sum(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            saver.save(step + 1)
        print(f"step {step + 1}: loss {loss.item()!r}")
distributed.destroy_process_group()
