"""Record under Accelerate: `accelerate launch accelerate_run.py run.chain`, or `python accelerate_run.py run.chain`.

Go on from any step: give `later.chain run.chain@6`.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from ckpt_recorder import Recorder
from ckpt_training import load

chain, source = sys.argv[1], sys.argv[2:]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
first = 0
if source:
    first = load(source[0], model, optimizer).step

world = accelerator.num_processes
data = torch.randn(12 * 2 * world * 8, 16, generator=torch.Generator().manual_seed(2))
loader = torch.utils.data.DataLoader(data[first * 2 * world * 8 :], batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with Recorder(model, optimizer, chain, step=first) as recorder:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch).squeeze(-1), batch.sum(-1))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            print(f"step {recorder.step}: loss {loss.item()!r}")
