"""Save a plain loop of PyTorch while it trains: `python plain_torch.py run.chain`.

Go on from any save: `python plain_torch.py later.chain run.chain@6`.
"""

import sys

import torch
from torch import nn

from ckpt_training import Saver, load

target, source = sys.argv[1], sys.argv[2:]
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Dropout(0.1), nn.Linear(50, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
first = 0
if source:
    first = load(source[0], model, optimizer, scheduler=scheduler).step  # random states, too

data = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(2))
with Saver(model, optimizer, target, scheduler=scheduler) as saver:
    for step in range(first, 12):
        loss = nn.functional.mse_loss(model(data[step]).squeeze(-1), data[step].sum(-1))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            saver.save(step + 1)  # returns at once
        print(f"step {step + 1}: loss {loss.item()!r}")
