"""The samples of Megatron core, against what Megatron itself loads of them: read, resharded, converted, and damaged."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ckpt.findings import find_problems
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from damage import BROKEN, ckpt

FOLDER = Path(__file__).parents[2] / "sample_checkpoints"
SAMPLES = sorted(FOLDER.glob("megatron-*"))
SHIFTED = FOLDER / "damaged" / "megatron-shifted-optimizer"
DEGREES = ("--tp 1 --pp 1", "--tp 2 --pp 1", "--tp 1 --pp 4", "--tp 1 --pp 2 --vpp 2", "--pp 2 --stages 0,3", "--dp 2")


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name)
def sample(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def assert_is_the_truth(actual: Checkpoint, sample: Path) -> None:
    with safe_open(sample / "truth.safetensors", "np") as file:
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    held = {f"{p.name}/{to_stored(state)}": tensor for p, state, tensor in actual.tensors() if p.role != "extra"}
    assert held.keys() == expected.keys()
    for key, array in expected.items():
        got = read(held[key])
        assert (got.dtype, got.shape) == (array.dtype, array.shape), key
        assert np.array_equal(got, array), key


def test_sample_has_the_values_of_its_run(sample: Path) -> None:
    checkpoint = open_checkpoint(sample)
    assert_is_the_truth(checkpoint, sample)
    assert find_problems(checkpoint, Execution()) == []


@pytest.mark.quick(1)
def test_sample_has_the_same_values_in_any_layout(sample: Path, tmp_path: Path) -> None:
    """Along a path of layouts, each made of the one before."""
    at = sample
    for number, degrees in enumerate(DEGREES):
        after = tmp_path / f"run{number}"
        assert ckpt("reshard", at, after, *degrees.split()).code == 0
        assert detect(after).name == detect(sample).name
        assert_is_the_truth(open_checkpoint(after), sample)
        at = after


@pytest.mark.quick(4)
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy", "universal", "dcp", "torch"])
def test_sample_has_the_same_values_in_any_format(sample: Path, tmp_path: Path, to: str) -> None:
    assert ckpt("convert", sample, tmp_path / "made", "--to", to).code == 0
    assert_is_the_truth(open_checkpoint(tmp_path / "made"), sample)


def test_shifted_states_are_found_and_refused(tmp_path: Path) -> None:
    verified = ckpt("verify", SHIFTED)
    assert verified.code == BROKEN
    assert "the optimizer's masters of" in verified.out
    for command in ("convert", "reshard"):
        refused = ckpt(command, SHIFTED, tmp_path / "out")
        assert refused.code == BROKEN
        assert "shifted" in refused.err
        assert not (tmp_path / "out").exists()
