"""Bases and flushes while a run goes on: every N steps, or as often as the tuner of the plan says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt.chains.chain import Chain
from ckpt.planning.costs import LogCosts, RunCosts
from ckpt.planning.search import best_logged
from ckpt_formats.core.errors import InvalidArgumentError, NoSpaceError
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import Bases, Recorder, segments
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_training import load


class Model(nn.Module):
    """With a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 131), nn.BatchNorm1d(131), nn.Linear(131, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.tanh(self.up(x)))).squeeze(-1)


def trained(chain: Path, steps: int, **options: object) -> tuple[Recorder, list[dict[str, bytes]]]:
    """A recorded run, and its weights and buffers after each step. Each step is noted."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    truths = [truth(model)]
    with Recorder(model, optimizer, chain, fingerprint=3, **options) as recorder:
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(9, 7, generator=torch.Generator().manual_seed(step))
            nn.functional.mse_loss(model(x), x.sum(-1)).backward()
            optimizer.step()
            recorder.note(mark=step + 1)
            truths.append(truth(model))
    return recorder, truths


def truth(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def restored(chain: Path, step: int, listed: chain_file.ChainIndex | None = None) -> dict[str, bytes]:
    state = states.open_state(chain, listed or chain_file.read(chain), step)
    return {name: bytes(parameter[...].tobytes()) for name, parameter in state.items()}


Recorded = tuple[Path, list[dict[str, bytes]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A chain of twelve steps with a base every five, and what the run had after each step."""
    chain = tmp_path_factory.mktemp("recorded") / "run.chain"
    recorder, truths = trained(chain, 12, bases=Bases(every=5))
    assert recorder.broken is None
    return chain, truths


def test_a_base_every_five_steps_begins_a_segment_and_every_step_is_what_the_run_had(recorded: Recorded) -> None:
    chain, truths = recorded
    assert [(one.first, one.step) for one in chain_file.read(chain).segments] == [(0, 5), (5, 10), (10, None)]
    for step in range(13):
        assert restored(chain, step) == truths[step], step
    assert Chain(chain).verify(replay=True).findings == ()


@pytest.mark.parametrize("step", [5, 7, 10])
def test_the_start_of_a_segment_is_the_state_after_the_step_before_it(step: int, recorded: Recorded) -> None:
    """Its buffers too, which the next forward pass has changed when it is stored; and without the segment before it."""
    chain, truths = recorded
    listed = chain_file.read(chain)
    alone = replace(listed, segments=tuple(one for one in listed.segments if one.first <= step)[-1:])
    assert restored(chain, step, alone) == truths[step]


def test_notes_of_the_step_before_a_base_are_restored_with_it(recorded: Recorded, tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    for step in (5, 6):
        assert load(f"{recorded[0]}@{step}", model, optimizer).extras["mark"] == step


def test_automatic_intervals_are_those_of_the_plan_for_what_is_measured() -> None:
    clock = iter(range(0, 10**9, 4))
    intervals = RecorderIntervals("auto", "auto", 3600.0, lambda: float(next(clock)))
    intervals.base_took(20.0)
    assert not intervals.base_due(10**6)  # no step was measured
    done = waited = 0
    intervals.step_done(1, 0.0)
    intervals.step_done(2, 0.0)
    for done in range(3, 65):
        waited += 2 if done % 4 == 0 else 0
        intervals.step_done(done, float(waited))
    run, log = RunCosts(3.5, 3600, 20), LogCosts(0.35, 0.0, 2.0)
    assert intervals.base_steps == pytest.approx(best_logged(run, log)[0], rel=0.2)
    assert 1 < intervals.flush_steps < 60
    assert intervals.base_due(intervals.base_steps)
    assert not intervals.base_due(intervals.base_steps - 1)


def test_a_run_with_automatic_intervals_is_restored_like_others(tmp_path: Path) -> None:
    """Failures all the time: after the first agreement, at step 8, a base is due after each step."""
    chain = tmp_path / "run.chain"
    recorder, truths = trained(chain, 10, bases=Bases(every="auto"), flush="auto", mtbf=0.001)
    assert recorder.broken is None
    assert recorder._run.intervals.base_steps > 0
    assert len(chain_file.read(chain).segments) > 1
    for step in range(11):
        assert restored(chain, step) == truths[step], step


def test_intervals_without_sense_are_refused(tmp_path: Path) -> None:
    for every in (-1, "often"):
        with pytest.raises(InvalidArgumentError) as refused:
            Bases(every=every)
        assert refused.value.hint
    for options in ({"flush": 0}, {"bases": Bases(every="auto")}, {"flush": "auto", "mtbf": -1.0}):
        with pytest.raises(InvalidArgumentError) as refused:
            trained(tmp_path / "run.chain", 1, **options)
        assert refused.value.hint
    assert not (tmp_path / "run.chain").exists()


def test_a_base_that_cannot_be_stored_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = tmp_path / "run.chain"
    begin = segments.begin

    def fails(run: Path, draft: object, **options: bool) -> object:
        if draft.first:  # type: ignore[attr-defined]
            raise NoSpaceError("no space left", where=run)
        return begin(run, draft, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(segments, "begin", fails)
    with pytest.warns(UserWarning, match="no space left"):
        recorder, truths = trained(chain, 8, bases=Bases(every=5), retry=0)
    assert recorder.broken is not None
    assert restored(chain, 5) == truths[5]
