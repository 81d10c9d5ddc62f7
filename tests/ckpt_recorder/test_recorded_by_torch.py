"""Steps that torch's own optimizers replay: of 16-bit weights without masters, and of whole matrices."""

import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients.layout import CHUNK, LoggedOptimizer
from ckpt_formats.universal.gradients.optimizers import step_of
from ckpt_formats.universal.gradients.segment import open_segment
from ckpt_recorder import Recorder
from damage import ckpt

Truth = dict[tuple[str, str], bytes]
STEPS = 5


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def truth_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Truth:
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        (names[p], key): content(value) for p, of in optimizer.state.items() for key, value in of.items() if value.dim()
    }
    return {(name, "model"): content(parameter) for parameter, name in names.items()} | moments


def assert_restored(chain: Path, truths: list[Truth]) -> None:
    for step, truth in list(enumerate(truths))[1::2]:
        parameters = states.open_state(chain, chain_file.read(chain), step).parameters
        for (name, state), expected in truth.items():
            assert read(parameters[name].states[state]).tobytes() == expected, (step, name, state)


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    chain: Path,
    before: Callable[[int], object] = lambda step: None,
    **options: object,
) -> tuple[Recorder, list[Truth]]:
    """Train and record. Returns the recorder, and all states by their steps. `before`: called before each step."""
    truths = [truth_of(model, optimizer)]
    with Recorder(model, optimizer, chain, random_states=False, **options) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            before(step)
            optimizer.step()
            truths.append(truth_of(model, optimizer))
    return recorder, truths


def test_a_method_whose_package_is_installed_while_the_process_runs_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    optimizer = LoggedOptimizer("new.Optimizer", "new", "exact", {}, ())
    with pytest.raises(UnsupportedError, match="no installed package"):
        step_of(optimizer, {}, tmp_path)
    (tmp_path / "new_methods.py").write_text("def make(type, options):\n    return type, options\n")
    info = tmp_path / "new_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: new-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt.optimizers]\nnew = new_methods:make\n")
    importlib.invalidate_caches()
    assert step_of(optimizer, {"lr": 1}, tmp_path) == ("new.Optimizer", {"lr": 1})


@pytest.mark.slow
def test_a_recorder_looks_for_methods_of_packages_once_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, searches = metadata.entry_points, []

    def counted(**options: str) -> metadata.EntryPoints:
        searches.append(options)
        return search(**options)

    monkeypatch.setattr(metadata, "entry_points", counted)
    model, chain = nn.Linear(9, 5).bfloat16(), tmp_path / "run.chain"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    record(model, optimizer, torch.randn(5, 9).bfloat16(), chain)
    assert method_of(chain) == {"torch"}
    assert len([one for one in searches if one.get("group") == "ckpt.optimizers"]) <= 1


def method_of(chain: Path) -> set[str]:
    segments = (open_segment(chain / one.folder) for one in chain_file.read(chain).segments)
    return {optimizer.method for one in segments for optimizer in one.layout.optimizers}


def mixed() -> nn.Module:
    """Weights in bfloat16 of more than one chunk, and a norm in float32."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(601, 451), nn.LayerNorm(451))
    assert model[0].weight.numel() > CHUNK  # type: ignore[operator, union-attr]
    model[0].bfloat16().register_forward_hook(lambda module, args, out: out.float())
    return model


def test_adamw_is_replayed_for_weights_in_bfloat16_beside_others(tmp_path: Path) -> None:
    model, chain = mixed(), tmp_path / "run.chain"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.randn(5, 601).bfloat16()
    recorder, truths = record(model, optimizer, x, chain)
    assert (recorder.broken, recorder.exactness, method_of(chain)) == (None, "same library", {"torch"})
    assert_restored(chain, truths)


WHOLE = {
    "fused AdamW in bfloat16": (torch.bfloat16, lambda p: torch.optim.AdamW(p, 1e-2, fused=True)),
    "Muon": (torch.float32, lambda p: torch.optim.Muon(p, 1e-2)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_are_replayed_with_the_threads_of_the_run(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    dtype, make = WHOLE[name]
    model = nn.Linear(601, 451, bias=False).to(dtype)
    optimizer, chain = make(model.parameters()), tmp_path / "run.chain"
    before = torch.get_num_threads()

    def one_thread(step: int) -> None:
        if step == 2:
            torch.set_num_threads(1)

    try:
        torch.set_num_threads(3)
        recorder, truths = record(model, optimizer, torch.randn(5, 601).to(dtype), chain, before=one_thread)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert (recorder.exactness, method_of(chain)) == ("same library", {"torch"})
    segments = [open_segment(chain / one.folder).layout for one in chain_file.read(chain).segments]
    assert [(one.first, one.optimizers[0].threads) for one in segments] == [(0, 3), (2, 1)]
    assert_restored(chain, truths)
    notices = states.open_state(chain, chain_file.read(chain), STEPS).notices
    assert any("threads 1)" in notice.text for notice in notices)


def test_what_changes_the_steps_of_bfloat16_is_recorded_as_updates(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(9, 5).bfloat16()
    optimizer, chain = torch.optim.AdamW(model.parameters(), 1e-2, fused=True), tmp_path / "run.chain"

    def scale(step: int) -> None:
        optimizer.grad_scale = torch.full((), 2.0) if step == 2 else None  # type: ignore[attr-defined]

    _, truths = record(model, optimizer, torch.randn(5, 9).bfloat16(), chain, before=scale)
    assert method_of(chain) == {"torch", "update"}
    assert_restored(chain, truths)


def test_a_replay_begins_with_a_stored_state_in_float16(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(9, 5).half()
    optimizer, chain = torch.optim.Adamax(model.parameters(), 1e-2, eps=1e-4), tmp_path / "run.chain"
    x = torch.randn(5, 9).half()
    record(model, optimizer, x, chain)
    assert ckpt("restore", chain, tmp_path / "base", "--step", STEPS).code == 0
    other = tmp_path / "other.chain"
    assert ckpt("append", other, tmp_path / "base").code == 0
    _, truths = record(model, optimizer, x, other, step=STEPS)
    parent = open_segment(other / chain_file.read(other).segments[0].folder).layout.parent
    assert parent is not None
    assert states.last_step(other, chain_file.read(other)) == 2 * STEPS
    for step, truth in enumerate(truths, STEPS):
        parameters = states.open_state(other, chain_file.read(other), step).parameters
        assert all(read(parameters[n].states[s]).tobytes() == value for (n, s), value in truth.items())
