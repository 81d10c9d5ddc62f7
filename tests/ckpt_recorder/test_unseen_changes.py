"""Changes that torch does not count, in models too large to be hashed at each step."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import Recorder, watch
from ckpt_recorder.watch import StateWatch
from damage import ckpt

CHANGED, STEPS = 19, 24


def test_frozen_tensors_that_were_changed_by_numpy_are_found_and_the_steps_between_are_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "SMALL_NBYTES", 0)  # as a large model: only one tensor is hashed at each step
    monkeypatch.setattr(watch, "_SHARE", 0.0)
    torch.manual_seed(1)
    model = nn.ModuleDict({"student": nn.Linear(3, 2), "teacher": nn.Linear(3, 2).requires_grad_(False)})
    optimizer = torch.optim.SGD(model["student"].parameters(), 0.1)
    truths = []
    with Recorder(model, optimizer, tmp_path / "run.chain", prove=False):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model["student"](torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step == CHANGED:
                for tensor in model["teacher"].parameters():
                    tensor.numpy()[:1] += 1
            truths.append({name: tensor.numpy().copy() for name, tensor in model["teacher"].state_dict().items()})
    chain = chain_file.load(tmp_path / "run.chain" / chain_file.NAME)
    outcomes = {}
    for step in (CHANGED - 4, CHANGED, STEPS):
        state = states.open_state(tmp_path / "run.chain", chain, step)
        is_doubtful = any("torch does not count" in notice.text for notice in state.notices)
        restored = {name: read(state.parameters[f"teacher.{name}"].weight) for name in truths[0]}
        is_exact = all(np.array_equal(values, truths[step - 1][name]) for name, values in restored.items())
        outcomes[step] = is_exact, is_doubtful
    assert outcomes == {CHANGED - 4: (True, False), CHANGED: (False, True), STEPS: (True, False)}
    logged = re.search(r"steps (\d+ to \d+) are in doubt: `teacher.(weight|bias)`", caplog.text)
    assert logged is not None
    assert re.search(
        f"in doubt: `teacher.(weight|bias)`.* at steps {logged[1]},", ckpt("log", tmp_path / "run.chain").out
    )


def test_watch_finds_what_was_changed_between_two_turns_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SMALL_NBYTES", 0)
    one, other = torch.zeros(4), torch.zeros(4)
    tensors = {"one": one, "other": other}
    looks = StateWatch[str](lambda: 0.0)
    for moment in range(4):  # one of them at each look
        looks.refresh(tensors)
        assert not looks.changed_earlier(tensors, moment)
    looks.refresh(tensors)
    other.numpy()[2] = one.numpy()[1] = 5.0
    looks.refresh(tensors)
    assert looks.changed_earlier(tensors, 5) == {"one": 2, "other": 3}
    looks.refresh(tensors)
    one.numpy()[1] = 6.0
    assert looks.changed(tensors) == ["one"]
    looks.refresh_some({"one": one})
    one.add_(1)
    looks.refresh(tensors)
    assert not looks.changed_earlier(tensors, 6), "it was recorded, and torch counted the rest"
