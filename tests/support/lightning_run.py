"""A small model that real Lightning trains. Lightning takes seconds to import: tests import this when they run."""

from typing import Any

import lightning
import torch
from torch import nn


class Model(lightning.LightningModule):
    """With dropout, so that losses depend on random states, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


def fit(callbacks: Any, epochs: int, seed: int = 0, **options: Any) -> tuple[Model, Any]:
    """Train for so many epochs of three steps. `options`: of Lightning's Trainer."""
    lightning.seed_everything(seed, verbose=False)
    model, data = Model(), torch.randn(12, 6, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=callbacks, enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model, trainer
