"""Write the samples of PyTorch's distributed checkpoints: `python sample_checkpoints/make_dcp.py`, with torch.

Two real ones by FSDP2, each with `truth.safetensors` gathered from the live run (keys `<parameter>/<state>`, the
weights under `param`), and a copy of the first with one bit flipped. `dcp-2.2-fsdp1-w2` is `make_dcp_old.py`'s.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
from safetensors.torch import save_file
from torch import distributed

from engines import ranks
from torch_jobs.kinds import NESTED, TRAININGS, Training
from torch_jobs.run import start
from torch_jobs.train import save
from torch_jobs.truth import gather

HERE = Path(__file__).resolve().parent
SAMPLES = {"fsdp2-w2": "fsdp2_w2", "fsdp2-w2-tp2-tied-frozen": "fsdp2_w2_tp2_tied_frozen"}
DAMAGED = "dcp-flipped-bit"


def sample(training: Training, folder: Path, out: Path) -> None:
    """Train and save; called in every rank. `folder` is relative, since torch keeps its name in the metadata."""
    run = start(training)
    run.train(training.steps)
    truth = gather(run)
    save(run, NESTED, folder, out)
    if distributed.get_rank() == 0:
        _save(truth, folder / "truth.safetensors")


def _save(truth: dict[str, Any], path: Path) -> None:
    tensors = {f"{name}/param": value for name, value in truth["model"].items()}
    tensors |= {f"{name}/{key}": value for name, states in truth["optimizer"].items() for key, value in states.items()}
    about = {"step": str(truth["step"]), "param_groups": json.dumps(truth["groups"])}
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, about)


def flip(folder: Path) -> None:
    """Flip one bit in the middle of a tensor's item, which is nearly all values."""
    stored = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    place = next(place for index, place in stored.items() if index.fqn == "model.tok_embeddings.weight")
    with (folder / place.relative_path).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0b0000_0100]))


def main() -> None:
    os.chdir(HERE)
    release = ".".join(torch.__version__.split(".")[:2])
    for name, training_name in SAMPLES.items():
        training = replace(TRAININGS[training_name], hidden=32)
        folder = Path(f"dcp-{release}-{name}")
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary)
            ranks.run(
                training.world,
                lambda training=training, folder=folder, out=out: sample(training, folder, out),
                out / "logs",
                join=ranks.join_torch,
            )
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder.name}: {size / 1e6:.1f} MB")
    damaged = HERE / "damaged" / DAMAGED
    shutil.rmtree(damaged, ignore_errors=True)
    whole = HERE / f"dcp-{release}-{next(iter(SAMPLES))}"
    shutil.copytree(whole, damaged, ignore=shutil.ignore_patterns("truth.safetensors"))
    flip(damaged)


if __name__ == "__main__":
    main()
