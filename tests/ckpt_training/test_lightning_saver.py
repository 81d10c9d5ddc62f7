"""Lightning's Trainer saves through `LightningSaver`, and a new Trainer goes on with the same losses."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import ckpt
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_training import LightningSaver

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


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


def fit(saver: LightningSaver, epochs: int, seed: int = 0) -> tuple[Model, Any]:
    """Train for so many epochs of three steps."""
    lightning.seed_everything(seed, verbose=False)
    model, data = Model(), torch.randn(12, 6, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[saver], enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model, trainer


@pytest.mark.filterwarnings("ignore")
def test_losses_go_on_after_a_save_of_the_callback(tmp_path: Path) -> None:
    whole, _ = fit(LightningSaver(tmp_path / "whole.chain"), 4)
    assert list(ckpt.Chain(tmp_path / "whole.chain")) == [3, 6, 9, 12]
    fit(LightningSaver(tmp_path / "run.chain"), 2)
    saver = LightningSaver(tmp_path / "run.chain")
    resumed, trainer = fit(saver, 4, seed=1)
    assert saver.loaded is not None
    assert saver.loaded.step == 6
    assert saver.loaded.verified > 0
    assert trainer.global_step == 12
    assert resumed.losses == whole.losses[6:]
    assert all(torch.equal(one, resumed.state_dict()[name]) for name, one in whole.state_dict().items())
    assert list(ckpt.Chain(tmp_path / "run.chain")) == [3, 6, 9, 12]


@pytest.mark.filterwarnings("ignore")
def test_callback_saves_every_so_many_steps(tmp_path: Path) -> None:
    fit(LightningSaver(tmp_path / "run", every_n_train_steps=2), 1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    with pytest.raises(InvalidArgumentError, match="every_n_train_steps=0 is below 1"):
        LightningSaver(tmp_path / "run", every_n_train_steps=0)
