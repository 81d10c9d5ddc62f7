"""Models of transformers, their translations to Megatron core and back, and what both libraries compute of them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

from ckpt_cli.main import cli
from engines.launch import run_script
from megatron_jobs.families import INPUT

JOBS = Path(__file__).parents[1] / "jobs"
ON_GPUS = ("mamba2", "nemotron_h")
"""Families that Megatron core computes only with CUDA's kernels."""
CLOSE = 1e-5
"""Logits are about 1 to 5, and other choices of any family change them by 1e-3 or more."""


def convert(source: Path, target: Path, *options: str) -> str:
    """Return what the command notes."""
    done = CliRunner().invoke(cli, ["convert", str(source), str(target), *options])
    assert done.exit_code == 0, (source, done.stderr, done.exception)
    return done.stderr


def by_transformers(folders: Mapping[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    """What transformers computes of folders, and what it says of their tensors."""
    torch.save(torch.tensor(INPUT), out / "input.pt")
    jobs = [
        {
            "folder": folder,
            "input": out / "input.pt",
            "logits": out / f"{name}.pt",
            "report": out / f"{name}.json",
        }
        for name, folder in folders.items()
    ]
    (out / "jobs.json").write_text(json.dumps(jobs, default=str))
    run_script(JOBS / "hf_jobs" / "logits.py", [str(out / "jobs.json")], len(jobs))
    return {
        name: json.loads((out / f"{name}.json").read_text()) | {"logits": torch.load(out / f"{name}.pt")}
        for name in folders
    }


def save_models(names: Iterable[str], out: Path) -> None:
    """OUT/NAME and OUT/NAME.pt of each: see `hf_jobs/save_models.py`."""
    run_script(JOBS / "hf_jobs" / "save_models.py", [str(out), *names], 2)


def translate(names: Iterable[str], out: Path) -> None:
    """OUT/NAME.megatron, what Megatron computes of it (OUT/NAME.megatron.pt), and OUT/NAME.back.

    NAME.back is translated back by Megatron's arguments alone.
    """
    jobs = []
    for name in names:
        convert(out / name, out / f"{name}.megatron", "--to", "megatron-legacy")
        (weights,) = (out / f"{name}.megatron").rglob("model_optim_rng.pt")
        root = torch.load(weights, weights_only=False)
        if name.startswith("deepseek"):  # its down projections are split over ranks in plain layers only, as here
            root["args"].transformer_impl = "local"
        torch.save({key: value for key, value in root.items() if not key.startswith("hf/")}, weights)
        convert(out / f"{name}.megatron", out / f"{name}.back", "--to", "hf")
        if not name.startswith(ON_GPUS):
            jobs.append({"weights": str(weights), "logits": str(out / f"{name}.megatron.pt")})
    (out / "load.json").write_text(json.dumps(jobs))
    run_script(JOBS / "megatron_jobs" / "logits.py", ["load", str(out / "load.json")], 3)


def split(options: Mapping[str, str], out: Path) -> None:
    """OUT/NAME.split.pt: what Megatron computes on the ranks over which OUT/NAME.megatron is resharded."""
    jobs = []
    for name, degrees in options.items():
        target = out / f"{name}.split"
        done = CliRunner().invoke(cli, ["reshard", str(out / f"{name}.megatron"), str(target), *degrees.split()])
        assert done.exit_code == 0, (name, degrees, done.stderr, done.exception)
        (folder,) = target.glob("iter_*")
        jobs.append({"folder": str(folder), "logits": str(out / f"{name}.split.pt")})
    (out / "split.json").write_text(json.dumps(jobs))
    run_script(JOBS / "megatron_jobs" / "logits.py", ["split", str(out / "split.json")], len(jobs))


def assert_close(ours: Path, theirs: Path) -> None:
    """Raises `AssertionError` unless the logits in two files are the same but for rounding."""
    first, second = torch.load(ours), torch.load(theirs)
    if second.shape[1] > first.shape[1] == len(INPUT[0]):
        second = second[:, -first.shape[1] :]  # after those of layers for multi-token prediction
    assert first.shape == second.shape
    difference = float((first - second).abs().max())
    assert difference < CLOSE, f"{ours.name}: {difference:.1e}"


def assert_same_bits(ours: Path, theirs: Path) -> None:
    """Raises `AssertionError` unless two folders hold the same tensors, bit for bit."""
    first, second = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert first.keys() == second.keys(), ours.name
    for key, array in first.items():
        assert array.dtype == second[key].dtype
        assert np.array_equal(array, second[key]), f"{ours.name}: {key}"
