"""A restored step has the random states that its run went on with, in few bytes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_formats.core.values import Value
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients.held import HeldState
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import open_segment
from ckpt_recorder import Recorder
from ckpt_training.random_states import restore_random_states

STEPS = 24
WITHOUT_NOTE = 10


def draw() -> tuple[float, float, float]:
    return float(torch.rand(3).sum()), float(np.random.rand()), random.random()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A run that draws before and after each step; and for each step, what it draws next."""
    torch.manual_seed(3)
    model, drawn = nn.Linear(2, 1), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    chain = tmp_path_factory.mktemp("random") / "run.chain"
    with Recorder(model, optimizer, chain, fingerprint=0) as recorder:
        drawn[0] = draw()
        for step in range(1, STEPS + 1):
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()
            if step == WITHOUT_NOTE:
                drawn[step] = draw()
                continue
            for _ in range(1 + 300 * (step % 2)):  # new words of each generator
                draw()
            recorder.note(step=step)
            drawn[step] = draw()
    return chain, drawn


def states_of(chain: Path, step: int) -> Value:
    checkpoint = states.open_state(chain, chain_file.read(chain), step)
    return checkpoint.extras["random_states"]["rank-00000"]


@pytest.mark.parametrize("step", [0, 1, 2, WITHOUT_NOTE, WITHOUT_NOTE + 1, STEPS])
def test_a_step_has_the_random_states_of_its_note(step: int, recorded: tuple[Path, dict[int, Any]]) -> None:
    chain, drawn = recorded
    restore_random_states(states_of(chain, step))
    assert draw() == drawn[step]


def test_a_shadow_has_the_random_states(recorded: tuple[Path, dict[int, Any]]) -> None:
    chain, drawn = recorded
    held = HeldState(chain / chain_file.read(chain).segments[0].folder, None)
    assert held.find_start(8)
    held.load(1)
    for step in (2, STEPS - 10, STEPS):
        while held.tail.poll(8) < step:
            held.advance(held.tail.window().last, 1)
        held.advance(step, 1)
        restore_random_states(held.checkpoint().extras["random_states"]["rank-00000"])
        assert draw() == drawn[step]


def test_random_states_take_few_bytes_in_a_step(recorded: tuple[Path, dict[int, Any]]) -> None:
    chain, _ = recorded
    segment = open_segment(chain / chain_file.read(chain).segments[0].folder)
    records = [one for one in segment.records(0, Kind.RANDOM) if one.step > 0]
    assert sum(64 + one.meta_nbytes + 16 * one.count + one.nbytes for one in records) < 500 * STEPS
