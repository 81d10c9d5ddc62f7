"""Record Lightning's Trainer: `python lightning_run.py run.chain`.

Go on from any step: give `later.chain run.chain@6`.
"""

import sys

import lightning
import torch
from torch import nn

import ckpt_recorder
from ckpt_training import load


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 1))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.layers(batch).squeeze(-1), batch.sum(-1))

    def configure_optimizers(self):
        return self.optimizer


chain, source, first = sys.argv[1], sys.argv[2:], 0
torch.manual_seed(1)
model = Model()
if source:
    first = load(source[0], model, model.optimizer).step
data = torch.randn(24, 8, 16, generator=torch.Generator().manual_seed(2))[2 * first :]
recording = ckpt_recorder.LightningCallback(chain, step=first)
options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "logger": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=[recording], **options)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
