"""Save ZeRO while it trains: `DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_zero.py run.chain`.

Go on from any save, on any number of ranks: give `later.chain run.chain@6`.
"""

import sys

import deepspeed
import torch
from torch import distributed, nn

from ckpt_training import Saver, load

target, source = sys.argv[1], sys.argv[2:]
deepspeed.init_distributed("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 1))
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
if source:
    load(source[0], engine)  # the engine has its optimizer, and counts steps

data = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(2))
with Saver(engine, None, target) as saver:
    for step in range(engine.global_steps, 12):
        mine = data[step].chunk(world)[rank].bfloat16()
        loss = nn.functional.mse_loss(engine(mine).squeeze(-1).float(), mine.float().sum(-1))
        engine.backward(loss)
        engine.step()
        if step % 3 == 2:
            saver.save(step + 1)
        print(f"step {step + 1}: loss {loss.item()!r}")
