"""A checkpoint without its optimizer keeps the step, the arguments and all other extras."""

from pathlib import Path

import numpy as np

import ckpt
from damage import SAMPLES
from damage import ckpt as command


def test_dropping_the_optimizer_keeps_the_step_the_weights_and_what_the_trainer_saved(tmp_path: Path) -> None:
    source = ckpt.open(SAMPLES / "transformers-5.23-trainer")
    assert "exp_avg" in next(iter(source.values())).states
    dropped = source.without_optimizer()
    assert {state for parameter in dropped.values() for state in parameter.states} == {"model"}
    assert (dropped.step, dropped.groups) == (source.step, ())
    removed = source.extras.keys() - dropped.extras.keys()
    assert removed <= {"scheduler", "lr_scheduler", "scaler"}
    assert dropped.extras.keys() > source.weights_only().extras.keys()
    done = command("convert", SAMPLES / "transformers-5.23-trainer", tmp_path / "u", "--drop-optimizer")
    assert done.code == 0, done.err
    written = ckpt.open(tmp_path / "u")
    assert (written.step, written.extras.keys()) == (source.step, dropped.extras.keys())
    for name, parameter in source.items():
        assert np.array_equal(written[name].weight[:], parameter.weight[:])


def test_weights_are_rounded_from_masters_before_the_optimizer_is_dropped(tmp_path: Path) -> None:
    run = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    assert command("convert", run, tmp_path / "u", "--drop-optimizer", "--dtype", "fp32").code == 0
    name, master = next((n, p.states["master"]) for n, p in ckpt.open(run).items() if "master" in p.states)
    assert np.array_equal(ckpt.open(tmp_path / "u")[name].weight[:], master[:])
