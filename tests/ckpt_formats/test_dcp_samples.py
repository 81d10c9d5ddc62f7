"""The samples of PyTorch's distributed checkpoints, of this torch and of an old one, against what the runs held."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.registry.unread_files import UNREAD

SAMPLES = sorted(path for path in (Path(__file__).parents[2] / "sample_checkpoints").glob("dcp-*"))


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name)
def sample(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def assert_is_the_truth(actual: Checkpoint, truth: Path) -> None:
    with safe_open(truth, "np") as file:
        expected, about = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    held = {
        f"{parameter.name}/{'param' if state == MODEL else state}": tensor
        for parameter, state, tensor in actual.tensors()
        if parameter.role != "extra"
    }
    assert held.keys() == expected.keys()
    for key, array in expected.items():
        got = read(held[key])
        assert (got.dtype, got.shape) == (array.dtype, array.shape), key
        assert np.array_equal(got, array), key
    groups = json.loads(about["param_groups"])
    assert [sorted(group.names) for group in actual.groups] == [sorted(group.pop("names")) for group in groups]
    assert [json.loads(json.dumps(dict(group.options))) for group in actual.groups] == groups
    assert actual.origin.step == int(about["step"])


def test_sample_has_the_values_of_its_run(sample: Path) -> None:
    checkpoint = open_checkpoint(sample)
    assert_is_the_truth(checkpoint, sample / "truth.safetensors")
    assert [str(notice) for notice in checkpoint.notices] == [f"{UNREAD}: truth.safetensors"]
    assert find_problems(checkpoint, Execution()) == []


def test_universal_holds_what_the_sample_holds(sample: Path, tmp_path: Path) -> None:
    save(open_checkpoint(sample), tmp_path / "u", writable("universal"))
    assert_is_the_truth(open_checkpoint(tmp_path / "u"), sample / "truth.safetensors")


def test_dcp_carries_values_of_old_releases() -> None:
    (old,) = (open_checkpoint(path) for path in SAMPLES if path.name.startswith("dcp-2.2-"))
    assert old.extras["train_state"] == {"step": 5, "seen": [1, 2], "note": "no tensor here"}
    assert old.extras["random"][1] == {"epoch": 1}
    assert np.array_equal(read(old.parameters[old.extras["random"][0].name].weight), np.arange(4))
