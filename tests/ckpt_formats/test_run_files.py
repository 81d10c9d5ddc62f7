"""Files beside a checkpoint go with it into a checkpoint of DeepSpeed, and a Trainer goes on from them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.job import save
from ckpt_formats.core.checkpoint import MODEL, Parameter
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.deepspeed import DeepSpeed
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES
from engines import launch

TRAINER = SAMPLES / "transformers-5.23-trainer"
JOB = Path(__file__).parents[1] / "jobs" / "hf_jobs" / "resume_zero.py"


def test_the_files_of_a_trainer_are_files_again(tmp_path: Path) -> None:
    save(open_checkpoint(TRAINER), tmp_path / "out", DeepSpeed(dp=2))
    beside = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert beside == {path.name for path in TRAINER.iterdir()} - {"model.safetensors", "optimizer.pt"} | {"latest"}
    for name in ("config.json", "trainer_state.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((TRAINER / name).read_text())
    schedulers = [torch.load(at / "scheduler.pt") for at in (TRAINER, tmp_path / "out")]
    assert schedulers[0] == schedulers[1]
    random, copy = (torch.load(at / "rng_state.pth", weights_only=False) for at in (TRAINER, tmp_path / "out"))
    assert torch.equal(random["cpu"], copy["cpu"])
    assert random["python"] == copy["python"]
    (model,) = (tmp_path / "out").glob("*/*model_states.pt")
    assert not [key for key in torch.load(model, weights_only=False) if key.startswith("hf/")]


def test_the_files_come_back_through_the_universal_format(tmp_path: Path) -> None:
    shutil.copytree(TRAINER, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.model").write_bytes(b"\0pieces\xff")
    source = open_checkpoint(tmp_path / "run")
    save(source, tmp_path / "u.ucp", writable("universal").for_target(tmp_path / "u.ucp"))
    save(open_checkpoint(tmp_path / "u.ucp"), tmp_path / "out", DeepSpeed())
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\0pieces\xff"
    again = open_checkpoint(tmp_path / "out")
    keys = {key for key in source.extras if key.startswith("hf/")}
    assert {key for key in again.extras if key.startswith("hf/")} == keys
    assert again.extras["hf/trainer_state.json"] == source.extras["hf/trainer_state.json"]


OUTSIDE = ["..", "", "a/b.json", "../out.json", "/etc/passwd", "a\0b.json", ".ckpt", "latest", "global_step4"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_file_is_written_elsewhere(name: str, tmp_path: Path) -> None:
    """What cannot be a file beside the checkpoint stays an item in the engine's own files."""
    source = open_checkpoint(TRAINER)
    content = Parameter("content", "extra", {MODEL: Tensor.of(ArrayBlob(np.ones(2, np.uint8)))})
    value: Value = {"a": 1} if name.endswith(".json") else TensorName("content")
    (tmp_path / "run").mkdir()
    hostile = replace(source, parameters={**source.parameters, "content": content}, extras={f"hf/{name}": value})
    save(hostile, tmp_path / "run" / "out", DeepSpeed())
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert {path.name for path in (tmp_path / "run" / "out").iterdir()} == {"latest", "global_step4"}
    assert (tmp_path / "run" / "out" / "latest").read_text() == "global_step4"
    (model,) = (tmp_path / "run" / "out").glob("*/*model_states.pt")
    assert f"hf/{name}" in torch.load(model, weights_only=False)


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_a_trainer_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Trained by one rank with DeepSpeed's ZeRO, resharded for two: the same losses and learning rates."""
    launch.run_script(JOB, [str(tmp_path)], 2)
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("before", "after"))
    assert len(set(before["rates"].values())) == len(before["rates"]) == 4
    assert after["rates"] == before["rates"]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
    assert len(list((tmp_path / "after" / "checkpoint-2").glob("*/*optim_states.pt"))) == 2
