"""Write the sample checkpoints: `python sample_checkpoints/make.py`, with DeepSpeed installed.

Three real ones, each with `truth.safetensors` gathered from the live engine (keys `<parameter>/<state>`, and `frozen`,
`buffer` for what the optimizer does not own), copies of the first damaged in ways that happen, and what DeepSpeed's own
converter to its universal format makes of two.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import deepspeed
from safetensors.torch import save_file
from torch import distributed

from engines import ranks
from engines.kinds import KINDS, Kind
from engines.run import start
from engines.to_universal import convert
from engines.train import client_state
from engines.truth import gather

HERE = Path(__file__).resolve().parent
SAMPLES = {
    "zero1-bf16-dp2": "z1_bf16_dp2",
    "zero3-bf16-dp4-tied-frozen": "z3_bf16_dp4_tied_frozen",
    "bf16opt-tp2-pp2": "z1_bf16opt_tp2_pp2_dp1",
}
UNIVERSAL = ("zero1-bf16-dp2", "zero3-bf16-dp4-tied-frozen")
LATER = 3
"""Steps between the sample and the later save which lends a file to the one of mixed steps."""


def sample(kind: Kind, folder: Path, later: Path) -> None:
    """Train, save, train on, save again; called in every rank."""
    run = start(kind)
    for steps, place in ((kind.steps, folder), (LATER, later)):
        run.train(steps)
        truth = gather(run)
        total = run.engine.global_steps
        run.engine.save_checkpoint(str(place), tag=f"global_step{total}", client_state=client_state(kind, total))
        if distributed.get_rank() == 0:
            assert truth is not None
            _save(truth, place / "truth.safetensors")
            for script in place.glob("*.py"):
                script.unlink()


def universal(source: Path, folder: Path) -> None:
    """The same by DeepSpeed's own converter; the truth is the source's."""
    shutil.rmtree(folder, ignore_errors=True)
    step = source / (source / "latest").read_text()
    failure = convert(step, folder / f"{step.name}_universal")
    assert failure is None, failure
    _report(folder)


def _report(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder.name}: {size / 1e6:.1f} MB")


def damage(whole: Path, later: Path, out: Path) -> None:
    """The copies; a damaged checkpoint has no truth."""

    def copy(name: str) -> tuple[Path, Path]:
        """The copy, and in it the optimizer shard of rank 1."""
        folder = out / name
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("truth.safetensors"))
        return folder, next(folder.glob("*/*zero_pp_rank_1_*_optim_states.pt"))

    _, shard = copy("missing-rank")
    shard.unlink()
    _, shard = copy("flipped-bit")
    _flip(shard)
    _, shard = copy("truncated-shard")
    os.truncate(shard, shard.stat().st_size * 2 // 3)
    _, shard = copy("mixed-steps")
    shutil.copyfile(next(later.glob(f"*/{shard.name}")), shard)
    folder, _ = copy("wrong-latest")
    (folder / "latest").write_text("global_step9")


def _flip(shard: Path) -> None:
    """Flip one bit in the middle of the largest tensor of a shard."""
    with zipfile.ZipFile(shard) as members:
        largest = max((m for m in members.infolist() if "/data/" in m.filename), key=lambda member: member.file_size)
    with shard.open("r+b") as file:
        file.seek(largest.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        middle = largest.header_offset + 30 + name + extra + largest.file_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0b0000_0100]))


def _save(truth: dict[str, Any], path: Path) -> None:
    tensors = {f"{name}/{key}": value for name, states in truth["params"].items() for key, value in states.items()}
    tensors |= {f"{name}/frozen": value for name, value in truth["frozen"].items()}
    tensors |= {f"{name}/buffer": value for name, value in truth["buffers"].items()}
    about = {"step": str(truth["step"]), "param_groups": json.dumps(truth["param_groups"])}
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, about)


def main() -> None:
    release = ".".join(deepspeed.__version__.split(".")[:2])
    damaged = HERE / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    for name, kind_name in SAMPLES.items():
        kind = dataclasses.replace(KINDS[kind_name], hidden=32)
        folder = HERE / f"deepspeed-{release}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            later, logs = Path(temporary, "later"), Path(temporary, "logs")
            ranks.run(kind.world, lambda kind=kind, folder=folder, later=later: sample(kind, folder, later), logs)
            if kind_name == "z1_bf16_dp2":
                damage(folder, later, damaged)
        _report(folder)
    for name in UNIVERSAL:
        universal(HERE / f"deepspeed-{release}-{name}", HERE / f"ds_to_universal-{release}-{name}")


if __name__ == "__main__":
    main()
