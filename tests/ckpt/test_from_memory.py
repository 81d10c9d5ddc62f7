"""Checkpoints of tensors in memory, and lists of those in a folder."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import ckpt as library
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, NotFoundError, UnsupportedError
from ckpt_formats.core.version import VERSION
from damage import SAMPLES
from held import STORABLE, array


def test_a_state_dict_of_torch_comes_back_bit_for_bit_with_its_ties(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    state = {
        "embed": weight,
        "head": weight,
        "bf16": torch.randn(5).bfloat16(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "strided": torch.randn(4, 3).T,
        "empty": torch.ones(0, 2),
        "other.empty": torch.ones(0, 2),
        "grad": torch.nn.Parameter(torch.randn(2)),
    }
    run = library.from_state_dict(state, step=5)
    assert (run.step, dict(run.aliases)) == (5, {"head": "embed"})
    for path in (tmp_path / "u", tmp_path / "w.pt"):
        library.save(run, path)
        back = library.open(path).state_dict()
        assert back.keys() == state.keys()
        for name, one in state.items():
            assert (back[name].dtype, back[name].shape) == (one.dtype, one.shape), name
            bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (back[name], one)]
            assert torch.equal(*bits), name
    assert library.diff(run, library.open(tmp_path / "u"), tensors_only=True).same


def test_arrays_of_every_type_become_a_checkpoint_and_others_are_refused() -> None:
    arrays = {dtype.name: array(dtype, (3, 2)) for dtype in STORABLE}
    run = library.from_state_dict(arrays)
    assert all(np.asarray(run[name]).tobytes() == one.tobytes() for name, one in arrays.items())
    for wrong in ({"a": "text"}, {"model": {"w": torch.ones(2)}}, {"a": np.array(["x"])}, {"a": [1.0]}):
        with pytest.raises(InvalidArgumentError, match="is not a tensor"):
            library.from_state_dict(wrong)
    with pytest.raises(UnsupportedError, match=r"torch\.bits8"):
        library.from_state_dict({"a": torch.empty(2, dtype=torch.bits8)})


def test_checkpoints_of_a_folder_come_the_newest_last(tmp_path: Path) -> None:
    run = library.from_state_dict({"w": np.ones(2, np.float32)})
    for step in (10, 9, 100):
        library.save(run, tmp_path / f"step-{step}", library.Universal())
    assert [path.name for path in library.checkpoints(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert library.checkpoints(tmp_path / "step-9") == [tmp_path / "step-9"]
    (tmp_path / "none").mkdir()
    assert library.checkpoints(tmp_path / "none") == []
    with pytest.raises(NotFoundError):
        library.checkpoints(tmp_path / "gone")


def test_replace_adds_names_and_shapes_only_when_told() -> None:
    run = library.open(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2")
    longer, bias = np.ones((300, 32), ml_dtypes.bfloat16), np.zeros(300, np.float32)
    with pytest.raises(InvalidArgumentError, match="has the shape"):
        run.replace({"head.weight": longer}, new_names=True)
    with pytest.raises(NoMatchError, match="no parameter is called"):
        run.replace({"head.more": bias}, new_shapes=True)
    edited = run.replace({"head.weight": longer, "head.more": bias}, new_names=True, new_shapes=True)
    assert (edited["head.weight"].shape, edited["head.more"].shape, len(edited)) == ((300, 32), (300,), len(run) + 1)
    assert edited.missing_in(run) == ["head.more"]
    assert run.missing_in(list(run)) == list(run.aliases)


def test_the_library_states_its_version() -> None:
    assert library.__version__ == VERSION
