"""Saves of live runs of real engines have what the engines' own checkpoints have, and runs go on from them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckpt
from ckpt.chains.verify import verify_chain
from ckpt.pipeline import Execution
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file
from engines.launch import run_script
from object_stores import BUCKET, moto, reached
from saving_jobs.steps import STEPS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KINDS = (
    "ddp:folder",
    "ddp:failing",
    "fsdp2:store",
    "fsdp2:dcpstore",
    "hsdp_2x2",
    "fsdp1_flat_2x2",
    "zero1:dcp",
    "zero3",
    "megatron_fp16",
)
SCRIPT = Path(__file__).parents[1] / "jobs/saving_jobs/save.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all saved runs, for a user of the store that has the others."""
    out = tmp_path_factory.mktemp("saved")
    with moto() as server, reached(server):
        run_script(SCRIPT, [str(out), *KINDS], len(KINDS))
        yield out


@pytest.mark.parametrize("kind", [name.replace(":", "-") for name in KINDS if name != "ddp:failing"])
def test_a_save_has_the_bits_of_the_engines_own_checkpoint(kind: str, saved: Path) -> None:
    folder = saved / kind
    is_chain = not kind.endswith(("-folder", "-dcp", "-dcpstore"))
    place = f"s3://{BUCKET}/{kind}" if kind.endswith("store") else str(folder)
    path = f"{place}/run.chain@{STEPS[1]}" if is_chain else f"{place}/saves/step-{STEPS[1]:08d}"
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
    order = frozenset if kind.startswith("megatron") else tuple  # a Megatron file has no order of names
    names = {order(group.names) for group in own.groups}
    assert {order(group.names) for group in save.groups if group.names} == {one for one in names if one} or not names
    assert save.extras.get("optimizer") == (own.extras["optimizer"] if kind == "megatron_fp16" else None)
    log = json.loads((folder / "log.json").read_text())
    assert log["kinds"] == (["base", "delta", "delta"] if is_chain else ["base"] * 3)
    if kind != "zero3":  # after its own load, too, DeepSpeed goes on with other bits
        assert log["resumed"] == log["losses"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process loads
def test_torch_loads_a_save_in_its_own_format_on_another_number_of_ranks(saved: Path, tmp_path: Path) -> None:
    """Two ranks of ZeRO 1 have saved, whose partitions are ranges of elements; torch loads in one process."""
    save = saved / f"zero1-dcp/saves/step-{STEPS[1]:08d}"
    metadata = FileSystemReader(save).read_metadata()
    tensors = {
        name: torch.zeros(one.size, dtype=one.properties.dtype)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=save, no_dist=True)
    own = ckpt.open(saved / "zero1-dcp/engine")
    for name, parameter in own.parameters.items():
        if parameter.role == "parameter":
            assert np.array_equal(tensors[f"model.{name}"].numpy(), read(parameter.states["master"]))
            moment = tensors[f"optim.state.{name}.exp_avg"].numpy()
            assert np.array_equal(moment, read(parameter.states["exp_avg"]))


def test_parity_of_a_save_replaces_the_file_of_a_rank(saved: Path, tmp_path: Path) -> None:
    save = shutil.copytree(saved / f"zero1-dcp/saves/step-{STEPS[1]:08d}", tmp_path / "save")
    lost = sorted(save.glob("*.distcp"))[1]
    whole = lost.read_bytes()
    lost.unlink()
    assert [one.path for one in ckpt.repair(save).damaged] == [lost]
    assert lost.read_bytes() == whole


def test_a_rank_that_fails_fails_the_save_of_all_ranks_and_the_next_one_is_whole(saved: Path) -> None:
    folder = saved / "ddp-failing"
    first, second = (json.loads((folder / f"messages{rank}.json").read_text()) for rank in (0, 1))
    assert [one[0] for one in (first, second)] == ["base", "base"]
    assert "step 2 is not saved: rank 1: RuntimeError: no state now" in first[1]
    assert "step 2 is not saved: RuntimeError: no state now" in second[1]
    assert "the process that writes the saves" in first[2]
    assert "the process that writes the saves has ended" in second[2]
    assert "rank 1 has not written its part of step 4 within 8 s" in first[3]
    assert "rank 0 has not written its part of step 40 within 8 s" in second[3]
    assert [one[4] for one in (first, second)] == ["delta", "delta"]
    assert [member.step for member in chain_file.load(folder / "run.chain" / chain_file.NAME).members] == [1, 50]
    assert verify_chain(folder / "run.chain", Execution(workers=1)).findings == ()
