"""Save under Accelerate: `accelerate launch accelerate_run.py run.chain`, or `python accelerate_run.py run.chain`.

Go on from any save: give `later.chain run.chain@6`.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from ckpt_training import Saver, load

target, source = sys.argv[1], sys.argv[2:]
accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
data = torch.randn(12 * accelerator.num_processes * 8, 16, generator=torch.Generator().manual_seed(2))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = load(source[0], model, optimizer).step if source else 0

with Saver(model, optimizer, target) as saver:
    for step, batch in enumerate(accelerator.skip_first_batches(loader, first), first):
        loss = nn.functional.mse_loss(model(batch).squeeze(-1), batch.sum(-1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            saver.save(step + 1)
        print(f"step {step + 1}: loss {loss.item()!r}")
