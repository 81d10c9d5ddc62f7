"""Trainer saves through `HuggingFaceSaver`, and a new Trainer goes on with the same losses."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt_formats.core.errors import IncompleteError
from late import Late

transformers: Any = Late("transformers")
ckpt_training: Any = Late("ckpt_training")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: Path, saver: Any, **options: Any) -> Any:
    """A small model with dropout, six updates in two epochs."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    )
    arguments = transformers.TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1, save_steps=1, use_cpu=True,
        report_to=[], disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Tokens(), callbacks=[saver])


def losses(trained: Any) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in trained.state.log_history if "loss" in one}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A chain with all six steps of a run, and its Trainer."""
    folder = tmp_path_factory.mktemp("whole")
    saver = ckpt_training.HuggingFaceSaver(folder / "run.chain")
    assert saver.checkpoint() is None
    run = trainer(folder / "own", saver)
    run.train()
    assert list(ckpt.Chain(folder / "run.chain")) == [1, 2, 3, 4, 5, 6]
    assert not list((folder / "own").glob("checkpoint-*"))
    return folder / "run.chain", run


@pytest.mark.parametrize("step", [2, 3], ids=["in_an_epoch", "between_epochs"])
def test_losses_go_on_after_a_save_of_the_callback(whole: tuple[Path, Any], step: int, tmp_path: Path) -> None:
    chain, run = whole
    (tmp_path / "steps").mkdir()
    ckpt.save(ckpt.Chain(chain)[step], tmp_path / "steps" / f"step-{step:08}")
    saver = ckpt_training.HuggingFaceSaver(tmp_path / "steps")
    resumed = trainer(tmp_path / "resumed", saver)
    resumed.train(resume_from_checkpoint=saver.checkpoint())
    assert saver.loaded is not None
    assert saver.loaded.step == step
    assert saver.loaded.verified > 0
    expected = {key: value for key, value in losses(run).items() if key > step}
    assert {key: value for key, value in losses(resumed).items() if key > step} == expected
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(3)}}, tmp_path / "run.pt")
    with pytest.raises(IncompleteError, match="the checkpoint has no state of a Trainer"):
        ckpt_training.HuggingFaceSaver(tmp_path / "run.pt").checkpoint()
