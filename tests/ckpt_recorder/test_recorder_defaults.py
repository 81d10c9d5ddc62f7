"""A recording does not depend on the program's defaults for dtypes and devices."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_recorder.probe import group_options, in_this_mode, probe
from ckpt_recorder.random_states import RandomStates, restore_random_states
from ckpt_recorder.stepper import step_of

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


def test_a_run_that_flushes_denormals_is_not_exact() -> None:
    result = probe(adamw(True), CPU)
    assert in_this_mode(result) == result
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = in_this_mode(probe(adamw(True), CPU))
    finally:
        torch.set_flush_denormal(False)
    assert (flushed.exactness, flushed.figures["denormals"]) == ("approximate", "flushed to zero")
