"""Saves of live runs of real engines have what the engines' own checkpoints have, and runs go on from them."""

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt_formats.core.tensor import read
from engines.launch import run_script
from saving_jobs.steps import STEPS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KINDS = ("ddp:folder", "hsdp_2x2", "fsdp1_flat_2x2", "zero1", "zero3")
SCRIPT = Path(__file__).parents[1] / "jobs/saving_jobs/save.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all saved runs."""
    out = tmp_path_factory.mktemp("saved")
    run_script(SCRIPT, [str(out), *KINDS], len(KINDS))
    return out


@pytest.mark.parametrize("kind", [name.partition(":")[0] for name in KINDS])
def test_a_save_has_the_bits_of_the_engines_own_checkpoint(kind: str, saved: Path) -> None:
    folder = saved / kind
    is_chain = (folder / "run.chain").exists()
    path = f"{folder / 'run.chain'}@{STEPS[1]}" if is_chain else folder / f"saves/step-{STEPS[1]:08d}"
    save, own = ckpt.open(path), ckpt.open(folder / "engine")

    def values(checkpoint: ckpt.Checkpoint) -> dict[tuple[str, str], Any]:
        named = {
            (parameter.name, state): read(tensor).tobytes()
            for parameter, state, tensor in checkpoint.tensors()
            if state != "step" and parameter.role != "extra"
        }
        counts = {name: parameter.count for name, parameter in checkpoint.parameters.items()}
        named |= {(name, "count"): int(count) for name, count in counts.items() if count is not None}
        return named

    of_save, of_engine = values(save), values(own)
    renamed = {name: save.aliases.get(name, name) for name, _ in of_engine}
    assert of_save == {(renamed[name], state): value for (name, state), value in of_engine.items()}
    names = {group.names for group in own.groups}
    assert {group.names for group in save.groups if group.names} == {one for one in names if one} or not names
    log = json.loads((folder / "log.json").read_text())
    assert log["kinds"] == (["base", "delta", "delta"] if is_chain else ["base"] * 3)
    if kind != "zero3":  # after its own load, too, DeepSpeed goes on with other bits
        assert log["resumed"] == log["losses"]
