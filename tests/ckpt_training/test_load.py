"""A checkpoint loads straight into a live model and optimizer of one process, and training goes on as it would have."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt_training import load


class Model(nn.Module):
    """With tied weights, a persistent buffer, an unused frozen parameter and a matrix in channels_last."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.word = nn.Embedding(11, 6)
        self.mix = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.word.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.word(tokens))
        image = self.mix(x.reshape(1, 2, -1, 3)).mean()
        logits: torch.Tensor = self.head(x) * image
        return logits


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), 1e-2),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 1e-2),
    "groups": lambda model: torch.optim.RMSprop(
        [{"params": [model.word.weight], "lr": 3e-3}, {"params": [*model.mix.parameters(), *model.norm.parameters()]}],
        1e-2,
        momentum=0.5,
    ),
}


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All values of a run, in an order that does not depend on names."""
    weights = [one.clone() for one in model.state_dict().values()]
    return [weights, copy.deepcopy(optimizer.state_dict())]


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


@pytest.fixture(scope="module", params=OPTIMIZERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Any]:
    """An optimizer, a torch file after three steps, the run's values then, and the losses of three more steps."""
    folder, model = tmp_path_factory.mktemp("saved"), Model()
    optimizer = OPTIMIZERS[request.param](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, range(3), scheduler)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(content, folder / "step3.pt")
    return (
        request.param,
        folder / "step3.pt",
        states_of(model, optimizer),
        train(model, optimizer, range(3, 6), scheduler),
    )


@pytest.mark.parametrize("form", ["torch", "universal"])
def test_load_gives_a_fresh_run_all_values_and_its_losses(saved: Any, form: str, tmp_path: Path) -> None:
    name, source, values, losses = saved
    if form == "universal":
        source = tmp_path / "step3"
        ckpt.save(ckpt.open(saved[1]), source, ckpt.Universal(codec="auto"))
    model = Model(seed=1)
    optimizer = OPTIMIZERS[name](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loaded = load(source, model, optimizer, scheduler=scheduler)
    assert_equal(states_of(model, optimizer), values)
    assert train(model, optimizer, range(3, 6), scheduler) == losses
    assert loaded.verified > 0
    assert [notice for notice in loaded.notices if "`frozen`" not in notice] == []
    assert (loaded.missing_keys, loaded.unexpected_keys, dict(loaded.extras)) == ((), (), {})


@pytest.fixture(scope="module")
def adamw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch file of AdamW after three steps."""
    folder, model = tmp_path_factory.mktemp("adamw"), Model()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "step3.pt")
    return folder / "step3.pt"


def run(seed: int = 1, kind: str = "adamw") -> tuple[Model, torch.optim.Optimizer]:
    model = Model(seed)
    return model, OPTIMIZERS[kind](model)


def test_load_lists_names_that_do_not_fit_and_changes_nothing(adamw: Path) -> None:
    model, optimizer = run()
    before = states_of(model, optimizer)
    prefixed = ckpt.open(adamw).rename(lambda name: f"model.{name}")
    with pytest.raises(ckpt.errors.IncompleteError, match=r"missing: `frozen`.*unexpected: `model\.frozen") as raised:
        load(prefixed, model, optimizer)
    assert raised.value.hint == "Pass names=lambda name: name.removeprefix('model.')."
    assert_equal(states_of(model, optimizer), before)
    load(prefixed, model, optimizer, names=lambda name: name.removeprefix("model."))
    assert_equal(model.state_dict(), torch.load(adamw)["model"])


def test_load_that_is_not_strict_reports_what_does_not_fit(adamw: Path) -> None:
    model, _ = run()
    model.norm, model.extra = nn.BatchNorm1d(7), nn.Linear(2, 2)
    with pytest.raises(
        ckpt.errors.IncompleteError, match=r"mismatched: `norm\.weight` \(\[6\] in the checkpoint, \[7\]"
    ):
        load(ckpt.open(adamw).weights_only(), model)
    loaded = load(ckpt.open(adamw).weights_only(), model, strict=False)
    assert loaded.missing_keys == ("extra.weight", "extra.bias")
    assert sorted(loaded.mismatched_keys) == ["norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"]
    assert torch.equal(model.word.weight, torch.load(adamw)["model"]["word.weight"])


def test_load_refuses_states_that_the_optimizer_does_not_keep(adamw: Path) -> None:
    model, optimizer = run(kind="sgd")
    with pytest.raises(ckpt.InvalidArgumentError, match=r"unexpected: `word\.weight \(exp_avg\)`"):
        load(adamw, model, optimizer)
    assert "word.weight (exp_avg_sq)" in load(adamw, model, optimizer, strict=False).unexpected_keys


def test_load_of_weights_alone_needs_no_states(adamw: Path) -> None:
    model, optimizer = run()
    weights = ckpt.open(adamw).weights_only()
    load(weights, model, optimizer)
    assert optimizer.state_dict()["state"] == {}
    fine, optimizer = run()
    ckpt.save(weights, path := adamw.with_name("weights.safetensors"), ckpt.Safetensors())
    with pytest.raises(ckpt.errors.IncompleteError, match=r"missing: `frozen \(step\)`") as raised:
        load(path, fine, optimizer)
    assert raised.value.hint == "To load weights alone, pass ckpt.open(source).weights_only() as the source."
    load(path, fine)
    assert_equal(fine.state_dict(), model.state_dict())


@pytest.mark.parametrize(("rounding", "refused"), [("weights", "exp_avg"), ("none", "frozen"), ("all", None)])
def test_load_rounds_what_it_may(adamw: Path, rounding: Any, refused: str | None) -> None:
    model = Model(seed=1).bfloat16()
    optimizer = OPTIMIZERS["adamw"](model)
    if refused is None:
        loaded = load(adamw, model, optimizer, rounding=rounding)
        assert loaded.cast["word.weight (exp_avg)"] == "float32 to bfloat16"
        stored = torch.load(adamw)
        assert torch.equal(model.word.weight, stored["model"]["word.weight"].bfloat16())
        states = optimizer.state[model.word.weight]
        assert torch.equal(states["exp_avg"], stored["optimizer"]["state"][1]["exp_avg"].bfloat16())
    else:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ckpt.UnsupportedError, match=rf"would be rounded, such as `.*{refused}"):
            load(adamw, model, optimizer, rounding=rounding)
        assert_equal(model.state_dict(), before)


def test_load_pads_a_vocabulary_only_if_its_rows_are_stated(adamw: Path) -> None:
    model = Model(seed=1)
    model.word.weight = model.head.weight = nn.Parameter(torch.ones(16, 6))
    source = ckpt.open(adamw).weights_only()
    with pytest.raises(ckpt.InvalidArgumentError, match=r"`word\.weight` \(\[11, 6\] in the checkpoint, \[16, 6\]"):
        load(source, model)
    load(source, model, vocab_rows=11)
    assert torch.equal(model.word.weight[:11], torch.load(adamw)["model"]["word.weight"])
    assert not model.word.weight[11:].any()


def test_load_compares_the_copies_of_what_the_model_ties(adamw: Path, tmp_path: Path) -> None:
    content = torch.load(adamw)["model"]
    for change in (0.0, 1.0):
        torch.save({**content, "head.weight": content["word.weight"] + change}, tmp_path / "untied.pt")
        if change:
            with pytest.raises(ckpt.CorruptError, match="replicas of one tensor differ"):
                load(tmp_path / "untied.pt", Model())
        else:
            load(tmp_path / "untied.pt", model := Model())
            assert torch.equal(model.head.weight, content["word.weight"])


def test_load_takes_the_newest_complete_checkpoint_of_a_folder(adamw: Path, tmp_path: Path) -> None:
    source = ckpt.open(adamw)
    for step in (9, 10, 11):
        ckpt.save(source, tmp_path / f"step{step}", ckpt.Universal())
    (tmp_path / "step11" / "manifest.json").write_text("{")
    (tmp_path / "step12").mkdir()
    model, optimizer = run()
    loaded = load(tmp_path, model, optimizer)
    assert loaded.source == str(tmp_path / "step10")
    assert list(loaded.passed_over) == ["step11"]


def test_load_names_the_tensor_and_the_file_of_a_flipped_bit(adamw: Path, tmp_path: Path) -> None:
    ckpt.save(ckpt.open(adamw), tmp_path / "step3", ckpt.Universal())
    tensor = ckpt.open(tmp_path / "step3")["mix.weight"].states["exp_avg"]
    (blob,) = tensor.fragments[0].blob.sources()
    data = bytearray(blob.path.read_bytes())
    data[blob.offset + 5] ^= 4
    blob.path.write_bytes(data)
    model, optimizer = run()
    with pytest.raises(ckpt.CorruptError, match=r"mix\.weight/exp_avg") as raised:
        load(tmp_path / "step3", model, optimizer)
    assert "00000.safetensors" in str(raised.value)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("The run now has values of both: load again.")
