"""Lightning's Trainer saves through `LightningSaver`, and a new Trainer goes on with the same losses."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt_formats.core.errors import InvalidArgumentError
from late import Late

ckpt_training: Any = Late("ckpt_training")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture
def fit() -> Any:
    """`lightning_run.fit`, imported when a test needs it."""
    from lightning_run import fit

    return fit


@pytest.mark.filterwarnings("ignore")
def test_losses_go_on_after_a_save_of_the_callback(tmp_path: Path, fit: Any) -> None:
    whole, _ = fit(ckpt_training.LightningSaver(tmp_path / "whole.chain"), 4)
    assert list(ckpt.Chain(tmp_path / "whole.chain")) == [3, 6, 9, 12]
    fit(ckpt_training.LightningSaver(tmp_path / "run.chain"), 2)
    saver = ckpt_training.LightningSaver(tmp_path / "run.chain")
    resumed, trainer = fit(saver, 4, seed=1)
    assert saver.loaded is not None
    assert saver.loaded.step == 6
    assert saver.loaded.verified > 0
    assert trainer.global_step == 12
    assert resumed.losses == whole.losses[6:]
    assert all(torch.equal(one, resumed.state_dict()[name]) for name, one in whole.state_dict().items())
    assert list(ckpt.Chain(tmp_path / "run.chain")) == [3, 6, 9, 12]


@pytest.mark.filterwarnings("ignore")
def test_callback_saves_every_so_many_steps(tmp_path: Path, fit: Any) -> None:
    fit(ckpt_training.LightningSaver(tmp_path / "run", every_n_train_steps=2), 1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    with pytest.raises(InvalidArgumentError, match="every_n_train_steps=0 is below 1"):
        ckpt_training.LightningSaver(tmp_path / "run", every_n_train_steps=0)
