"""Record ZeRO: `DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_zero.py run.chain`.

Go on from any step, on any number of ranks: give `later.chain run.chain@6`.
"""

import sys

import deepspeed
import torch
from torch import distributed, nn

from ckpt_recorder import Recorder
from ckpt_training import load

chain, source = sys.argv[1], sys.argv[2:]
deepspeed.init_distributed("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 1))
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
if source:
    load(source[0], engine)
data = torch.randn(12, 2, 8, 16, generator=torch.Generator().manual_seed(2))
with Recorder(engine, None, chain):  # the engine counts steps, and notes what it resumes with
    for step in range(engine.global_steps, 12):
        for micro_batch in data[step]:
            mine = micro_batch.chunk(world)[rank].bfloat16()
            loss = nn.functional.mse_loss(engine(mine).squeeze(-1).float(), mine.float().sum(-1))
            engine.backward(loss)
            engine.step()
        print(f"step {step + 1}: loss {loss.item()!r}")
