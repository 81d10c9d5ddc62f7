"""Record FSDP2: `torchrun --nproc-per-node 2 fsdp2.py run.chain`.

Go on from any step, on any number of ranks: `ckpt restore run.chain@6 step6 --to dcp`, then give `later.chain step6`.
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ckpt_recorder import Recorder

chain, restored = sys.argv[1], sys.argv[2:]
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(1)
model = fully_shard(nn.Sequential(nn.Linear(16, 51), nn.GELU(), nn.Linear(51, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
first = 0
if restored:
    weights, states = get_state_dict(model, optimizer)
    tree = {"model": weights, "optim": states, "step": 0}
    dcp.load(tree, checkpoint_id=restored[0])
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    first = tree["step"]

data = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(2))
with Recorder(model, optimizer, chain, step=first) as recorder:  # each rank records its shards
    for step in range(first, 12):
        mine = data[step].chunk(world)[rank]
        loss = nn.functional.mse_loss(model(mine).squeeze(-1), mine.sum(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.note(step=step + 1)
        print(f"step {step + 1}: loss {loss.item()!r}")
distributed.destroy_process_group()
