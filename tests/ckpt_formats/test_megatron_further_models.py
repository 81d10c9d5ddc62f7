"""Distributed checkpoints of Megatron with further models beside that of the arguments: teachers, pictures, critics."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES, UNSUPPORTED, ckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAMPLE = SAMPLES / "megatron-0.16-tp2-pp2-dist" / "iter_0000002"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Tensors:
    """The weights of the sample by their keys, in which layers are stacked."""
    metadata = dcp.FileSystemReader(SAMPLE).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in metadata.items()
        if isinstance(one, TensorStorageMetadata) and not key.startswith(("optimizer", "chained"))
    }
    dcp.load(tensors, checkpoint_id=SAMPLE, no_dist=True)
    return tensors


def with_more(folder: Path, model: Tensors, more: Tensors) -> Path:
    iteration = folder / SAMPLE.name
    dcp.save({**model, **more}, checkpoint_id=iteration, no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(SAMPLE / name, iteration / name)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder


def teacher(model: Tensors) -> Tensors:
    return {f"_teacher_model.{key}": one + 1 for key, one in model.items()}


def pictures(model: Tensors) -> Tensors:
    tower = {
        f"vision_model.{key}": one[..., :5].contiguous() for key, one in model.items() if key.startswith("decoder")
    }
    return {**tower, "vision_projection.encoder.linear_fc1.weight": torch.rand(7, 5)}


@pytest.mark.parametrize(("more", "other"), [(teacher, "_teacher_model"), (pictures, "vision_model")])
def test_further_models_are_read_layer_by_layer(
    more: Callable[[Tensors], Tensors], other: str, model: Tensors, tmp_path: Path
) -> None:
    tensors = more(model)
    run = with_more(tmp_path / "run", model, tensors)
    checkpoint = open_checkpoint(run)
    key = f"{other}.decoder.layers.self_attention.linear_qkv.weight"
    for layer in range(4):
        values: Any = read(checkpoint[f"{other}.decoder.layers.{layer}.self_attention.linear_qkv.weight"].weight)
        assert np.array_equal(values.view(np.uint16), tensors[key][layer].view(torch.uint16).numpy())
    assert any("sizes of further models" in notice.text and other in notice.names for notice in checkpoint.notices)
    done = ckpt("convert", run, tmp_path / "out", "--to", "megatron", "--tp", "1")
    assert (done.code, f"--skip '^{other}" in done.err) == (UNSUPPORTED, True)
    skip = [word for name in {key.partition(".")[0] for key in tensors} for word in ("--skip", rf"^{name}\.")]
    assert ckpt("convert", run, tmp_path / "out", "--to", "megatron", "--tp", "1", *skip).code == 0


def test_the_head_of_a_critic_may_have_one_row(model: Tensors, tmp_path: Path) -> None:
    run = with_more(tmp_path / "run", model, {"output_layer.weight": torch.rand(1, 32)})
    assert open_checkpoint(run)["output_layer.weight"].shape == (1, 32)
    run = with_more(tmp_path / "other", model, {"output_layer.weight": torch.rand(3, 32)})
    assert "has length 3" in ckpt("inspect", run).err
