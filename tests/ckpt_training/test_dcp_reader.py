"""`dcp.load` reads what ckpt opens, under the keys of any trainer, and refuses what it cannot fill exactly."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpt
import ckpt_training
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from ckpt_training import CkptReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.word = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.word(tokens)))
        return logits


class Run:
    """A model with an optimizer of two groups."""

    def __init__(self, seed: int = 0) -> None:
        self.model = Model(seed)
        decayed = [self.model.word.weight, self.model.head.weight]
        rest = [*self.model.norm.parameters(), self.model.head.bias]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]
        self.optimizer = torch.optim.AdamW(groups, 1e-2)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def nested(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint of torch after two steps, whose values of the optimizer are numbered, and its run."""
    run, folder = Run(), tmp_path_factory.mktemp("saved")
    run.train(range(2))
    scheduler = {"last_epoch": 2, "_last_lr": [0.5, 0.25], "inner": {"rates": (1, 2.5)}}
    content = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "step": 2}
    torch.save({**content, "lr_scheduler": scheduler, "seen": {"rng": torch.arange(4)}}, folder / "run.pt")
    return folder / "run.pt", run


@pytest.fixture(scope="module")
def weights(saved: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({name: one.contiguous() for name, one in saved[1].model.state_dict().items()}, file)
    return file


def load(state: dict[str, Any], reader: CkptReader, **options: Any) -> None:
    """`dcp.load`, raising the error of ckpt that torch wraps."""
    try:
        dcp.load(state, storage_reader=reader, **options)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


TREES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "nested": Run.nested,
    "one_key_above": lambda run: {"app": run.nested()},
    "top_level_and_flat": lambda run: {
        **run.model.state_dict(),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=FLAT),
    },
    "all_flat": lambda run: {
        **run.model.state_dict(),
        **get_optimizer_state_dict(run.model, run.optimizer, options=FLAT),
    },
}


@pytest.mark.parametrize("form", TREES)
def test_dcp_load_fills_each_form_of_keys(saved: tuple[Path, Run], form: str) -> None:
    file, run = saved
    state, reader = TREES[form](Run(seed=1)), CkptReader(file)
    load(state, reader)
    assert_same(state, TREES[form](run))
    loaded = reader.loaded
    assert loaded is not None
    assert loaded.verified > 0
    assert (loaded.missing_keys, loaded.unexpected_keys, loaded.unverified, loaded.notices) == ((), (), (), ())


def test_dcp_load_gives_plain_values_and_tensors_of_extras(saved: tuple[Path, Run]) -> None:
    zeros = {"last_epoch": 0, "_last_lr": [0.0], "inner": {"rates": (0, 0)}}
    state = {"lr_scheduler": zeros, "seen": {"rng": torch.zeros(4, dtype=torch.int64)}}
    load(state, CkptReader(saved[0]))
    assert_same(state["lr_scheduler"], {"last_epoch": 2, "_last_lr": [0.5, 0.25], "inner": {"rates": (1, 2.5)}})
    assert state["seen"]["rng"].tolist() == [0, 1, 2, 3]


def test_group_options_are_those_of_the_parameters(saved: tuple[Path, Run]) -> None:
    run = Run(seed=1)
    run.optimizer.param_groups.reverse()
    state = run.nested()
    load(state, CkptReader(saved[0]))
    rates = [(group["lr"], group["weight_decay"]) for group in state["optim"]["param_groups"]]
    assert rates == [(3e-3, 0.01), (1e-2, 0.1)]
    one_group = torch.optim.AdamW(run.model.parameters(), 1.0)
    with pytest.raises(InvalidArgumentError, match="parameters with different `lr` in the checkpoint"):
        load({"optim": get_optimizer_state_dict(run.model, one_group)}, CkptReader(saved[0]))
    with pytest.raises(InvalidArgumentError, match="parameters with different `weight_decay` in the checkpoint"):
        ckpt_training.load(saved[0], run.model, one_group)


def test_missing_keys_are_listed_before_a_value_changes(weights: Path) -> None:
    state = Run(seed=1).nested()
    before = state["model"]["word.weight"].clone()
    with pytest.raises(IncompleteError, match=r"missing: `optim\.state\.\S+, .* and 35 more") as caught:
        load(state, CkptReader(weights))
    assert caught.value.hint is not None
    assert torch.equal(before, state["model"]["word.weight"])
    reader = CkptReader(weights)
    load(state, reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert not torch.equal(before, state["model"]["word.weight"])
    assert reader.loaded is not None
    assert "optim.param_groups.0.lr" in reader.loaded.missing_keys


def test_hint_for_missing_keys_renames(weights: Path, saved: tuple[Path, Run]) -> None:
    source = ckpt.open(weights).rename(lambda name: f"net.{name}")
    state = {"model": Model(1).state_dict()}
    with pytest.raises(IncompleteError) as caught:
        load(state, CkptReader(source))
    assert caught.value.hint == "Pass names=lambda name: name.removeprefix('net.')."
    load(state, CkptReader(source, names=lambda name: name.removeprefix("net.")))
    assert_same(state["model"], saved[1].model.state_dict())


def test_unexpected_weights_are_refused_unless_strict_is_false(weights: Path) -> None:
    part = {"model": {"word.weight": torch.zeros(11, 6)}}
    with pytest.raises(InvalidArgumentError, match=r"unexpected: `norm.* and 3 more"):
        load(part, CkptReader(weights))
    load(part, CkptReader(weights, strict=False))
    load(part, CkptReader(ckpt.open(weights).select(only=[r"^word"])))
    with pytest.raises(InvalidArgumentError, match="weights under 2 prefixes"):
        load({"a": Model(1).state_dict(), "b": Model(1).state_dict()}, CkptReader(weights))


def test_other_shapes_are_refused(weights: Path) -> None:
    with pytest.raises(ValueError, match="Size mismatch between saved"):
        load({"word.weight": torch.zeros(12, 6)}, CkptReader(weights))


def test_weights_are_rounded_and_moments_are_not(saved: tuple[Path, Run]) -> None:
    file, run = saved
    state, reader = {"model": Model(1).bfloat16().state_dict()}, CkptReader(file)
    load(state, reader)
    assert_same(state["model"]["head.weight"], run.model.head.weight.detach().bfloat16())
    assert reader.loaded is not None
    assert reader.loaded.cast["head.weight"] == "float32 to bfloat16"
    with pytest.raises(UnsupportedError, match="would be rounded"):
        load(state, CkptReader(file, rounding="none"))
    optimizer = Run(seed=1).nested()["optim"]
    for states in optimizer["state"].values():
        states["exp_avg"] = states["exp_avg"].bfloat16()
    with pytest.raises(UnsupportedError, match=r"5 tensors would be rounded, such as `optim\.state\..*exp_avg`"):
        load({"optim": optimizer}, CkptReader(file))


def test_tied_tensor_is_not_missing_under_its_other_name(tmp_path: Path) -> None:
    save_file({"word": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    table, reader = torch.zeros(2, 3), CkptReader(tmp_path / "model.safetensors")
    load({"word": table, "head": table}, reader)
    assert torch.equal(table, torch.arange(6.0).reshape(2, 3))
    assert reader.loaded is not None
    assert reader.loaded.notices == ("tied tensors that the checkpoint has under another name: `head`",)
    with pytest.raises(IncompleteError, match="missing: `head`"):
        load({"word": table, "head": torch.zeros(2, 3)}, CkptReader(tmp_path / "model.safetensors"))


def test_views_of_any_strides_are_filled(weights: Path, saved: tuple[Path, Run]) -> None:
    view = torch.zeros(6, 22)[:, ::2].t()
    load({"word.weight": view}, CkptReader(weights, strict=False))
    assert torch.equal(view, saved[1].model.word.weight)


def test_flipped_bit_raises_with_tensor_and_file(saved: tuple[Path, Run], tmp_path: Path) -> None:
    data = bytearray(saved[0].read_bytes())
    at = data.index(saved[1].model.word.weight.detach().numpy().tobytes())
    data[at + 5] ^= 4
    (tmp_path / "run.pt").write_bytes(data)
    with pytest.raises(CorruptError, match=r"run\.pt: `word\.weight` model: ") as caught:
        load(Run(seed=1).nested(), CkptReader(tmp_path / "run.pt"))
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("The state dict now has values of both: load again.")


def test_checkpoint_id_and_errors_of_opening(weights: Path, tmp_path: Path) -> None:
    state = {"model": Model(1).state_dict()}
    load(state, CkptReader(), checkpoint_id=weights)
    with pytest.raises(NotFoundError):
        load(state, CkptReader(), checkpoint_id=tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match="no checkpoint is given"):
        load(state, CkptReader())


def test_objects_of_other_classes_are_refused(tmp_path: Path) -> None:
    torch.save({"model": Model(0).state_dict(), "path": tmp_path}, tmp_path / "run.pt")
    with pytest.raises(UnsupportedError, match="`path` is an object of the class pathlib"):
        load({"path": None}, CkptReader(tmp_path / "run.pt"))


def test_whole_state_dict_is_built_from_the_metadata(saved: tuple[Path, Run]) -> None:
    state: dict[str, Any] = {}
    reader = CkptReader(saved[0])
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert_same(state["model"], dict(saved[1].model.state_dict()))
    expected = saved[1].nested()["optim"]
    assert_same(state["optim"]["state"], expected["state"])
    assert [group["params"] for group in state["optim"]["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]
    assert state["lr_scheduler"]["_last_lr"] == [0.5, 0.25]


@pytest.mark.parametrize("sample", ["transformers-5.23-trainer", "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"])
def test_samples_of_engines_are_read(sample: str) -> None:
    source = ckpt.open(SAMPLES / sample)
    stored = ckpt.use_names(source, "megatron") if sample.startswith("transformers") else source
    dtypes = {name: torch.int64 if one.dtype == np.int64 else torch.float32 for name, one in stored.items()}
    state = {"model": {name: torch.zeros(one.shape, dtype=dtypes[name]) for name, one in stored.items()}}
    reader = CkptReader(SAMPLES / sample)
    load(state, reader)
    for name, parameter in stored.items():
        weight = parameter.states.get("master", parameter.weight)
        assert np.array_equal(state["model"][name].numpy(), np.asarray(weight, state["model"][name].numpy().dtype)), (
            name
        )
    assert reader.loaded is not None
    expected = ("the checkpoint's tensors are called as `megatron` calls them",) if stored is not source else ()
    assert reader.loaded.notices == expected


def test_page_of_dcp_shows_code_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (SAMPLES.parent / "docs" / "dcp.md").read_text(), re.DOTALL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "global_step1000").symlink_to(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2")
    monkeypatch.chdir(tmp_path)
    source = ckpt.open("run/global_step1000")
    dtypes = {name: getattr(torch, one.dtype.name) for name, one in source.items()}
    state = {"model": {name: torch.zeros(one.shape, dtype=dtypes[name]) for name, one in source.items()}}
    names = {"state": state}
    for code in blocks:
        exec(code, names)
    assert all(torch.equal(state["model"][name], one.torch()) for name, one in source.items())
    saved = ckpt.open("run/step-1000")
    assert all(torch.equal(saved[name].torch(), one.torch()) for name, one in source.items())


def test_errors_of_ranks_can_be_sent_between_processes() -> None:
    error = IncompleteError("a", where="b", hint="c")
    again: CkptError = pickle.loads(pickle.dumps(error))
    assert (again.what, again.where, again.hint) == ("a", "b", "c")
