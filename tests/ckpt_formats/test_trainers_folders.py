"""Folders of MLflow, RLlib and fairseq2, by the layouts that their sources state."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from damage import ckpt
from format_sources import WEIGHTS, fairseq2


def holds(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    assert {name: read(one.weight).tolist() for name, one in checkpoint.items()} == {
        name: one.tolist() for name, one in WEIGHTS.items()
    }
    return checkpoint


def test_the_pickled_module_of_mlflow_is_read(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))
    module.load_state_dict(WEIGHTS)
    (tmp_path / "data").mkdir()
    torch.save(module, tmp_path / "data" / "model.pth")
    (tmp_path / "data" / "pickle_module_info.txt").write_text("mlflow.pytorch.pickle_module")
    (tmp_path / "MLmodel").write_text("flavors:\n  pytorch:\n    model_data: data\n")
    checkpoint = holds(tmp_path)
    assert any("MLmodel" in notice for notice in checkpoint.notices)


def policy(folder: Path) -> None:
    folder.mkdir(parents=True)
    state = {"weights": {name: one.numpy() for name, one in WEIGHTS.items()}, "global_timestep": 4000}
    (folder / "policy_state.pkl").write_bytes(pickle.dumps(state, 2))
    (folder / "rllib_checkpoint.json").write_text(json.dumps({"type": "Policy", "state_file": "policy_state.pkl"}))


def test_the_policies_of_rllib_are_read_and_its_algorithm_named(tmp_path: Path) -> None:
    policy(tmp_path / "policies" / "default_policy")
    (tmp_path / "rllib_checkpoint.json").write_text(json.dumps({"type": "Algorithm"}))
    (tmp_path / "algorithm_state.pkl").write_bytes(pickle.dumps({"worker": {}}, 2))
    checkpoint = holds(tmp_path)
    assert any("algorithm_state.pkl" in notice for notice in checkpoint.notices)
    holds(tmp_path / "policies")
    policy(tmp_path / "policies" / "other")
    with pytest.raises(NotFoundError, match="holds 2 checkpoints: default_policy, other"):
        open_checkpoint(tmp_path)


def test_the_step_of_fairseq2_is_read_with_optimizer_and_trainer(tmp_path: Path) -> None:
    fairseq2(tmp_path / "step_7", 1)
    checkpoint = holds(tmp_path)
    assert (checkpoint.step, checkpoint.origin.engine) == (7, "fairseq2")
    assert read(checkpoint["0.bias"].states["exp_avg"]).tolist() == [1.0, 2.0, 3.0]
    assert checkpoint.groups[0].names == ("0.weight", "0.bias")
    assert checkpoint.extras["trainer"]["_lr_scheduler"] == {"last_epoch": 7}
    assert not [notice for notice in checkpoint.notices if "not read" in notice.text]
    holds(tmp_path / "step_7" / "model")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rows_of_all_ranks_of_fairseq2_are_joined(ranks: int, tmp_path: Path) -> None:
    checkpoint = holds(fairseq2(tmp_path / "step_7", ranks))
    assert any("sharded over ranks are not joined, and not read: optimizer/" in str(one) for one in checkpoint.notices)
    assert ckpt("convert", tmp_path, tmp_path / "out.safetensors").code == 0


def rename(old: str, new: str) -> Any:
    return lambda step: ((step / new).parent.mkdir(parents=True, exist_ok=True), (step / old).rename(step / new))


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (lambda step: (step / "model/pp_00/tp_00/sdp_00.pt").unlink(), IncompleteError, "sdp_00 is missing"),
        (lambda step: (step / "trainer/rank_00.pt").unlink(), IncompleteError, "rank_00 is missing"),
        (
            rename("model/pp_00/tp_00/sdp_01.pt", "model/pp_00/tp_01/sdp_00.pt"),
            UnsupportedError,
            "2 tensor-parallel ranks",
        ),
        (rename("model/pp_00/tp_00/sdp_01.pt", "model/pp_01/tp_00/sdp_00.pt"), CorruptError, "is in two stages"),
        (
            lambda step: torch.save({"new": torch.ones(1)}, step / "model/pp_00/tp_00/sdp_01.pt"),
            CorruptError,
            "`new` is not in sdp_00.pt",
        ),
        (lambda step: torch.save([1], step / "model/pp_00/tp_00/sdp_01.pt"), CorruptError, "not a dict of tensors"),
    ],
)
def test_a_step_of_fairseq2_that_is_not_whole_is_refused(
    harm: Any, error: type[CkptError], words: str, tmp_path: Path
) -> None:
    step = fairseq2(tmp_path / "step_7", 2)
    harm(step)
    with pytest.raises(error, match=words):
        open_checkpoint(step)


def test_arrays_are_a_model_only_where_nothing_else_is(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "model.pt")
    buffer = {"observations": {"x": np.ones((3, 2), np.float32)}}
    (tmp_path / "replay.pkl").write_bytes(pickle.dumps(buffer, 2))
    assert set(holds(tmp_path)) == set(WEIGHTS)
