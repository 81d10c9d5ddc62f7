"""A recording does not depend on the program's defaults for dtypes and devices."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import Recorder
from ckpt_recorder.probe import group_options, probe
from ckpt_recorder.stepper import step_of
from ckpt_training.random_states import RandomStates, restore_random_states

CPU = torch.device("cpu")


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def adamw(fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(2, 3, dtype=torch.float32))], fused=fused, foreach=False)


@pytest.mark.parametrize(("fused", "exactness"), [(True, "exact"), (False, "same library")])
def test_a_probe_does_not_depend_on_the_default_dtype(fused: bool, exactness: str, default_dtype: None) -> None:
    assert probe(adamw(fused), CPU).exactness == exactness


@pytest.mark.parametrize("count", [1, 301])
def test_a_replayed_step_does_not_depend_on_defaults(count: int, default_dtype: None) -> None:
    optimizer = adamw(False)
    step = step_of("torch.optim.adamw.AdamW", group_options(optimizer, optimizer.param_groups[0]))

    def result() -> list[bytes]:
        states = {name: np.linspace(0.1, 1, 7, dtype=np.float32) for name in step.states}
        step.apply(states, np.full(7, 0.3, np.float32), count, 0)
        return [values.tobytes() for values in states.values()]

    own = result()
    torch.set_default_dtype(torch.float32)
    assert result() == own


@pytest.mark.parametrize("threads", [None, 2])
def test_a_replayed_step_leaves_torch_its_threads(threads: int | None) -> None:
    optimizer, before = adamw(False), torch.get_num_threads()
    options = group_options(optimizer, optimizer.param_groups[0])
    step = step_of("torch.optim.adamw.AdamW", options, "float32", threads)
    try:
        torch.set_num_threads(3)
        step.apply({name: np.ones((2, 3), np.float32) for name in step.states}, np.ones((2, 3), np.float32), 1, 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_random_states_are_restored_with_another_default_device() -> None:
    states = {name: one.words for name, one in RandomStates().changed(0).items()}
    drawn = torch.rand(3)
    numpy = dict(zip(("kind", "keys", "position", "has_gauss", "cached"), np.random.get_state(), strict=True))
    python = {"version": 3, "words": states["python"].view("<u4"), "gauss": None}
    torch.set_default_device("meta")
    try:
        restore_random_states({"torch": states["torch"], "python": python, "numpy": numpy})
    finally:
        torch.set_default_device(None)
    assert torch.equal(torch.rand(3), drawn)


def test_steps_that_flush_denormals_are_recorded_as_updates(tmp_path: Path) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    with Recorder(model, optimizer, tmp_path / "run.chain", random_states=False) as recorder:
        try:
            for step in range(1, 7):
                torch.set_flush_denormal(step >= 3)
                model.weight.grad = torch.full((1, 3), 1e-36 if step == 2 else 1e-30)  # its square is a denormal
                optimizer.step()
                recorder.note()
        finally:
            torch.set_flush_denormal(False)
    run = tmp_path / "run.chain"
    segments = [states.open_steps(run, one) for one in chain_file.read(run).segments]
    assert [(one.first, one.layout.optimizers[0].method) for one in segments][-1] == (2, "update")
    restored = states.open_state(run, chain_file.read(run), 6)
    state = optimizer.state[model.weight]
    assert read(restored.parameters["weight"].states["exp_avg_sq"]).tobytes() == state["exp_avg_sq"].numpy().tobytes()
