"""`dcp.save` writes a universal checkpoint, which is read as what torch's own writer saves is read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

import ckpt
from ckpt_formats.core.errors import InvalidArgumentError, OutputError, UnsupportedError
from ckpt_training import CkptReader, CkptWriter
from object_stores import BUCKET, StoreServer, moto, reached

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with moto() as server:
        yield server


class Model(nn.Module):
    """With a buffer that counts, a frozen parameter and one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.randn(6).bfloat16())
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)


def run(optimizer: str = "adamw") -> tuple[Model, torch.optim.Optimizer]:
    """A model after one step."""
    model = Model()
    groups = [{"params": [model.word.weight], "lr": 3e-3}, {"params": [*model.norm.parameters(), model.scale]}]
    own = torch.optim.AdamW(groups, 1e-2) if optimizer == "adamw" else torch.optim.SGD(groups, 1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    own.step()
    return model, own


REST = {
    "train_state": {"step": 7, "seen": torch.arange(3)},
    "lr_scheduler": {"last_epoch": 7, "_last_lr": [0.5, 0.25], "pair": (1, None, b"x")},
    "rng": torch.arange(4, dtype=torch.uint8),
}


def nested(optimizer: str = "adamw") -> dict[str, Any]:
    model, own = run(optimizer)
    weights, states = get_state_dict(model, own)
    return {"model": weights, "optim": states, **REST}


def torchtitan() -> dict[str, Any]:
    model, own = run()
    flat = get_optimizer_state_dict(model, own, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {**model.state_dict(), "optimizer": flat, "train_state": REST["train_state"]}


def save(state: dict[str, Any], writer: CkptWriter, **options: Any) -> None:
    """`dcp.save`, raising the error of ckpt that torch wraps."""
    try:
        dcp.save(state, storage_writer=writer, **options)
    except CheckpointException as error:
        raise error.failures[0][0] from error


TREES: dict[str, Callable[[], dict[str, Any]]] = {
    "nested": nested,
    "torchtitan": torchtitan,
    "sgd": lambda: nested("sgd"),
    "weights": lambda: {"model": Model().state_dict(), "train_state": {"step": 7}},
}


@pytest.mark.parametrize("codec", [None, "auto"])
@pytest.mark.parametrize("form", TREES)
def test_saved_checkpoint_is_what_torchs_own_is(form: str, codec: Any, tmp_path: Path) -> None:
    state = TREES[form]()
    save(state, CkptWriter(tmp_path / "own", codec=codec))
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    own, torchs = ckpt.open(tmp_path / "own"), ckpt.open(tmp_path / "torch")
    assert set(own.parameters) == set(torchs.parameters)
    for name, parameter in torchs.parameters.items():
        assert own.parameters[name].role == parameter.role, name
        assert own.parameters[name].states.keys() == parameter.states.keys()
        for key, expected in parameter.states.items():
            stored = own.parameters[name].states[key]
            assert (stored.dtype, stored.shape) == (expected.dtype, expected.shape)
            assert np.asarray(stored).tobytes() == np.asarray(expected).tobytes(), f"{name}/{key}"
    assert [(dict(one.options), set(one.names)) for one in own.groups] == [
        (dict(one.options), set(one.names)) for one in torchs.groups
    ]
    assert own.extras == torchs.extras
    assert own.step == torchs.step == 7
    assert ckpt.verify(own) == []


def test_save_and_load_give_the_state_dict_back(tmp_path: Path) -> None:
    state, zeros = nested(), nested()
    for tensor in (
        *zeros["model"].values(),
        *(one for own in zeros["optim"]["state"].values() for one in own.values()),
    ):
        tensor.zero_()
    zeros["lr_scheduler"] = {"last_epoch": 0, "_last_lr": [], "pair": None}
    save(state, CkptWriter(), checkpoint_id=tmp_path / "step-7")
    dcp.load(zeros, storage_reader=CkptReader(tmp_path / "step-7"))
    for name, tensor in state["model"].items():
        assert torch.equal(zeros["model"][name], tensor)
    for name, own in state["optim"]["state"].items():
        assert all(torch.equal(zeros["optim"]["state"][name][key], value) for key, value in own.items())
    assert zeros["lr_scheduler"] == state["lr_scheduler"]


def test_step_of_a_tensor_and_names_that_begin_with_numbers(tmp_path: Path) -> None:
    def state(rate: float, step: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        own = torch.optim.AdamW(model.parameters(), rate)
        flat = get_optimizer_state_dict(model, own, options=StateDictOptions(flatten_optimizer_state_dict=True))
        return {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(step)}}

    save(state(0.25, 7), CkptWriter(tmp_path / "own"))
    dcp.load(loaded := state(0.5, 0), storage_reader=CkptReader(tmp_path / "own"))
    assert ckpt.open(tmp_path / "own").step == int(loaded["train_state"]["step"]) == 7
    assert loaded["optimizer"]["param_groups.0.weight.lr"] == loaded["optimizer"]["param_groups.1.bias.lr"] == 0.25


def test_async_save_publishes(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        dcp.async_save(nested(), storage_writer=CkptWriter(tmp_path / "own", step=9)).result()
    finally:
        dist.destroy_process_group()
    assert ckpt.open(tmp_path / "own").step == 9
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"`path` is not a plain value"):
        save({**nested(), "path": tmp_path}, writer := CkptWriter(tmp_path / "own"))
    assert not (tmp_path / "own").exists()
    save(nested(), writer)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    with pytest.raises(OutputError, match="the target exists"):
        save(nested(), writer)


def test_save_into_a_store_appears_whole_or_not_at_all(store: StoreServer, tmp_path: Path) -> None:
    target = f"s3://{BUCKET}/run/step-7"

    def names() -> set[str]:
        return {meta["path"] for page in obstore.list(store.client, "run/") for meta in page}

    writer = CkptWriter(codec="auto")
    with reached(store):
        with pytest.raises(UnsupportedError, match=r"`path` is not a plain value"):
            save({**nested(), "path": tmp_path}, writer, checkpoint_id=target)
        assert "run/step-7/.ckpt/job" in names()
        writer.reset()
        assert names() == set()
        save(nested(), writer, checkpoint_id=target)
        assert all(".ckpt" not in name for name in names())
        dcp.save(nested(), checkpoint_id=tmp_path / "torch")
        assert ckpt.diff(ckpt.open(target), ckpt.open(tmp_path / "torch")).same
        assert ckpt.verify(ckpt.open(target)) == []
        with pytest.raises(OutputError, match="exists"):
            save(nested(), writer)


def test_state_dicts_without_one_model_are_refused(tmp_path: Path) -> None:
    model, own = run()
    with pytest.raises(InvalidArgumentError, match="no model, or several"):
        save({"a": model.state_dict(), "b": model.state_dict()}, CkptWriter(tmp_path / "own"))
    with pytest.raises((UnsupportedError, InvalidArgumentError)):
        save({"model": model.state_dict(), "optimizer": own.state_dict()}, CkptWriter(tmp_path / "own"))
    with pytest.raises(UnsupportedError, match=r"no members of chains"):
        save(nested(), CkptWriter(tmp_path / "run.chain"))
    assert list(tmp_path.iterdir()) == []
