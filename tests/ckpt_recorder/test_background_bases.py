"""Bases that are copied while training goes on: each has the bits of its step, or the chain does not name it."""

import os
import signal
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_formats.core.checkpoint import MODEL
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import read
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.chain import chain_file, folder, states
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.gradients.layout import CHUNK, OptimizerVector, RankLayout, VectorPart
from ckpt_recorder import Bases, Recorder, RecorderWarning
from ckpt_recorder.background_bases import BackgroundBases, plan_pieces
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_recorder.options import RecorderOptions
from ckpt_training import copies
from ckpt_training.copies import HostCopies
from killing import killed_after

WIDTH, LAYERS, SECONDS = 258, 5, 120
EVERY = 1000
"""Steps between bases: tests say when one begins."""
BESIDE = 3
"""Steps while a base is made, at most."""
TRACED = 7
"""Steps whose memory is traced."""
ROLLING, AT_ONCE = Bases(EVERY, spread=3), Bases(EVERY, spread=1)
BOTH_BASES = pytest.mark.parametrize("bases", [ROLLING, AT_ONCE], ids=["rolling", "at once"])
Truth = dict[tuple[str, str], np.ndarray]


class Model(nn.Module):
    """Of several chunks, one of them shared by small tensors; a buffer changes, and one tensor steps now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        self.sometimes = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y = self.out(self.norm(x))
        return y * self.sometimes.mean() if step % 2 else y


class Run:
    """A run of one rank, and its state after each step."""

    def __init__(self, chain: Path, make: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = Model()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, 1e-3, fused=True) if make is None else make(parameters)
        self.truth: dict[int, Truth] = {}
        self.chain = chain
        options = {"bases": ROLLING, "random_states": False, **options}
        self.recorder = Recorder(self.model, self.optimizer, chain, **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            step = self.recorder.step
            self.optimizer.zero_grad()
            self.model(torch.randn(6, WIDTH), step).square().mean().backward()
            self.optimizer.step()
            self.recorder.note(mark=self.recorder.step)
            self.truth[self.recorder.step] = self._state()

    def until_ready(self) -> BackgroundBases:
        """Step until the base in progress is done, and another one can be made; after some steps, only wait.

        Each step is one more that a base, a proof and a restore replay.
        """
        deadline, steps = time.monotonic() + SECONDS, 0
        while self.bases is None or not (self.bases.is_ready or self.bases.failure):
            assert time.monotonic() < deadline
            if self.bases is None or steps < BESIDE:
                self.step()
                steps += 1
            time.sleep(0.05)
        return self.bases

    def begin_base(self) -> BackgroundBases:
        """Take a step after which a base begins."""
        bases = self.until_ready()
        self.recorder._run.bases._from = self.recorder.step + 1 - EVERY
        self.step()
        assert self.recorder._run.bases._making_since == self.recorder.step
        return bases

    @property
    def bases(self) -> BackgroundBases | None:
        return self.recorder._run.bases.process

    def _state(self) -> Truth:
        state = {(name, MODEL): tensor.numpy().copy() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[name, key] = torch.as_tensor(value).numpy().copy()
        return state

    def check_bases(self) -> list[int]:
        """The steps of all bases; each has exactly the values of its step."""
        chain = chain_file.read(self.chain)
        for member in chain.members:
            assert member.exact
            checkpoint, truth = open_member(self.chain, chain, member), dict(self.truth[member.step])
            assert checkpoint.extras["mark"] == member.step
            for name, parameter in checkpoint.parameters.items():
                if "step" in parameter.values:
                    assert parameter.values["step"] == truth.pop((name, "step"))
                for state, tensor in parameter.states.items():
                    expected = truth.pop((name, state), None)
                    assert expected is not None or not read(tensor).any()  # a state that has not begun
                    if expected is not None:
                        assert read(tensor).tobytes() == expected.tobytes(), (member.step, name, state)
            assert not truth
        assert {one.name.partition("-")[0] for one in self.chain.iterdir()} <= {
            *("chain.json", "chain.lock", "gradients", "step"),
        }
        return [member.step for member in chain.members]


def run_one_base(run: Run) -> None:
    """Begin a base, and go on until it is stored, or not."""
    run.begin_base()
    run.step(2)
    run.until_ready()
    run.step()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return tmp_path / "run.chain"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "adamw, by torch": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
}


@BOTH_BASES
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick(2)
def test_each_base_has_the_bits_of_its_step(name: str, bases: Bases, chain: Path) -> None:
    run = Run(chain, OPTIMIZERS[name], bases=bases)
    begun = []
    with run.recorder as recorder:
        for _ in range(2):
            run.begin_base()
            begun.append(recorder.step)
            run.step(3)
    assert recorder.broken is None
    assert run.check_bases() == [step + 2 * (bases == ROLLING) for step in begun]
    last = states.open_state(chain, chain_file.read(chain), recorder.step)  # replayed from the last base
    assert (
        read(last.parameters["out.weight"].weight).tobytes() == run.truth[recorder.step]["out.weight", MODEL].tobytes()
    )


def test_bases_at_once_of_an_approximate_log_are_exact(chain: Path) -> None:
    with pytest.raises(UnsupportedError, match="approximate"):
        Run(chain, codec="int8")
    run = Run(chain, codec="int8", bases=AT_ONCE)
    with run.recorder:
        run.begin_base()
    assert len(run.check_bases()) == 1


def layout_of(sizes: Sequence[int]) -> tuple[RankLayout, list[tuple[int, int]]]:
    parts = tuple(VectorPart(n, n, 0, size, size, Box.whole((size,))) for n, size in enumerate(sizes))
    vectors = tuple(OptimizerVector(0, 0, 0) for _ in sizes)
    return RankLayout(vectors, parts), [(n, 0) for n in range(len(sizes))]


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_pieces_have_each_element_once_and_are_small(steps: int) -> None:
    sizes = [3 * CHUNK + 5, CHUNK // 2, 2 * CHUNK, 70_000, 90_000, 5, 1, 60_000, 60_001]
    layout, offsets = layout_of(sizes)
    plan = plan_pieces(layout, offsets, CHUNK, steps)
    assert len(plan) == steps
    seen = np.zeros(sum(sizes), np.int64)
    starts = np.cumsum([0, *sizes])
    for pieces in plan:
        assert sum(piece.size for piece in pieces) <= sum(sizes) / steps + CHUNK
        for piece in pieces:
            assert piece.size == sum(one.size for one in piece.ranges) <= CHUNK
            for one in piece.ranges:
                seen[starts[one.tensor] + one.start : starts[one.tensor] + one.start + one.size] += 1
    assert (seen == 1).all()


class Gate(HostCopies):
    """Copies that wait until a test lets them go."""

    def __init__(self, free: int = 0) -> None:
        self.open, self.free, self.copied = threading.Event(), free, 0
        self.flip = False

    def free_nbytes(self) -> int:
        return self.free

    def copy(self, targets: Sequence[np.ndarray], sources: Sequence[torch.Tensor], after: Any) -> None:
        assert self.open.wait(SECONDS)
        super().copy(targets, sources, after)
        self.copied += sum(target.nbytes for target in targets)
        if self.flip:
            targets[0].view(np.uint32)[3] ^= 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    result = Gate()
    monkeypatch.setattr(copies, "copies_of", lambda device: result)
    return result


def test_an_update_waits_for_the_copies_of_what_it_changes(chain: Path, gate: Gate) -> None:
    run = Run(chain, bases=AT_ONCE)
    with run.recorder:
        bases = run.begin_base()
        assert gate.copied == 0
        threading.Timer(0.3, gate.open.set).start()
        run.step()
        assert gate.copied == sum(p.nbytes for p in run.model.parameters()) * 3
        assert bases.waited > 0.1
    assert len(run.check_bases()) == 1


def test_with_free_memory_on_the_device_late_pieces_are_staged(chain: Path, gate: Gate) -> None:
    """The update does not wait for them, and they have the values from before it."""
    gate.free = 1 << 30
    run = Run(chain, bases=AT_ONCE)
    with run.recorder:
        run.until_ready()._orders.put(lambda link: gate.open.wait(SECONDS))
        run.begin_base()
        run.step(3)
        assert gate.copied == 0
        gate.open.set()
    assert len(run.check_bases()) == 1


def test_with_little_memory_the_update_waits_for_the_pieces_that_are_not_staged(chain: Path, gate: Gate) -> None:
    gate.free = 2 * 3 * 4 * WIDTH * WIDTH
    run = Run(chain, bases=replace(AT_ONCE, memory=1))
    with run.recorder:
        run.until_ready()._orders.put(lambda link: gate.open.wait(SECONDS))
        bases = run.begin_base()
        threading.Timer(0.3, gate.open.set).start()
        run.step()
        staged = [piece for piece in bases._pending if piece.staged is not None]
        assert staged == bases._pending[-2:] or staged == bases._pending[-3:]  # the last one is small
        run.step(2)
    assert len(run.check_bases()) == 1


@BOTH_BASES
def test_a_base_that_differs_from_the_log_is_not_named(bases: Bases, chain: Path, gate: Gate) -> None:
    gate.open.set()
    run = Run(chain, bases=bases)
    with run.recorder as recorder:
        gate.flip = True
        with pytest.warns(RecorderWarning, match="not stored: .* differs from the (log|run)") as warned:
            run_one_base(run)
        assert len(warned) == 1
        gate.flip = False
        run.begin_base()
        run.step(2)
    assert recorder.broken is None
    assert len(run.check_bases()) == 1


def is_proved(step: int) -> bool:
    """Whether the recorder proves a step after the first ones."""
    return step & (step - 1) == 0 or step % RecorderOptions().fingerprint == 0


@BOTH_BASES
def test_memory_is_that_of_the_ring(bases: Bases, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = 6 if bases == ROLLING else 1
    run = Run(chain, bases=Bases(EVERY, spread, memory=1 << 20))
    state = 3 * sum(parameter.nbytes for parameter in run.model.parameters())
    largest = 3 * 4 * WIDTH * WIDTH
    with run.recorder:
        run.step(16)  # proofs copy states, too: of the first steps, and then of those that `is_proved` knows
        process = run.until_ready()
        while any(map(is_proved, range(run.recorder.step + 1, run.recorder.step + TRACED + 1))):
            run.step()
        assert process.nbytes <= 4 * (largest + 4096) < state
        monkeypatch.setattr(run, "_state", dict)
        tracemalloc.start()
        try:
            run.begin_base()
            begun = run.recorder.step
            run.step(TRACED - 1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < state / 4
    assert [member.step for member in chain_file.read(chain).members] == [begun + spread - 1]


def test_killed_bases_do_not_stop_training_and_others_follow(chain: Path, gate: Gate) -> None:
    gate.open.set()
    run = Run(chain)
    with run.recorder as recorder:
        bases = run.begin_base()
        assert bases.pid is not None
        os.kill(bases.pid, signal.SIGKILL)
        bases._orders.put(lambda link: link.next_message() and None)
        wait_for(lambda: bases.failure is not None)
        with pytest.warns(RecorderWarning, match="process that writes bases has ended"):
            run.step(3)
        recorder._run.bases._from = recorder.step + 1 - EVERY
        run.step()  # this one cannot begin: another process starts
        assert run.bases is None
        run.begin_base()
        run.step(2)
    assert recorder.broken is None
    assert len(run.check_bases()) == 1


def test_a_process_that_died_between_two_bases_costs_none(chain: Path) -> None:
    run = Run(chain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run.recorder as recorder:
            bases = run.until_ready()
            assert bases.pid is not None
            os.kill(bases.pid, signal.SIGKILL)
            wait_for(lambda: bases.has_failed)
            recorder._run.bases._from = recorder.step + 1 - EVERY
            run.step()
            assert run.bases is None
            run.begin_base()
            run.step(2)
    assert len(run.check_bases()) == 1


@pytest.mark.slow
def test_a_killed_trainer_leaves_a_good_chain_and_leftovers_go(chain: Path) -> None:
    """A base whose pieces are complete is stored even then; any other one is dropped."""

    def work() -> None:
        run = Run(chain, bases=replace(ROLLING, every=4))
        with run.recorder:
            while True:
                run.step()

    for seconds in (0.7, 1.4):
        assert killed_after(work, seconds, chain / chain_file.NAME)
        wait_for(lambda: not any(map(folder.is_growing, chain.iterdir())))
        wait_for(lambda: not list(chain.glob("pieces-*")))  # which the process of bases stores, or drops
        listed = chain_file.read(chain)
        last = states.last_step(chain, listed)
        states.open_state(chain, listed, last).parameters["out.weight"][...]
        for step in (member.step for member in listed.members if member.step < last):
            assert states.open_state(chain, listed, step).extras["mark"] == step
        for one in sorted(chain.iterdir(), reverse=True):
            if one.is_dir():
                place_at(chain).remove([one.name], first=folder.MANIFEST)
        (chain / chain_file.NAME).unlink()


def test_leftovers_of_bases_are_removed_by_the_next_recorder(chain: Path) -> None:
    with Run(chain).recorder:
        pass
    left = chain / "pieces-0000000003.0123abcd"
    left.mkdir()
    (left / "rank-00000.ckg.tmp").write_bytes(b"x")
    with Run(chain).recorder:
        assert not left.exists()


def test_what_makes_no_sense_is_refused(chain: Path) -> None:
    for fields in ({"every": 0}, {"spread": -1}, {"memory": 0}, {"every": "sometimes"}):
        with pytest.raises(InvalidArgumentError, match="cannot be"):
            replace(ROLLING, **fields)
    with pytest.raises(InvalidArgumentError, match="mean time between failures"):
        Run(chain, bases=replace(ROLLING, every="auto"))


def test_bases_follow_each_other_at_a_distance() -> None:
    """With `auto`, four times as many steps as a base takes until it is stored."""
    intervals = RecorderIntervals("auto", 8, 3600.0)
    intervals.base_copied(1e-9, 500)
    for done in range(1, 17):
        intervals.step_done(done, 0.0)
    assert intervals.base_steps == 2000


def test_a_run_without_bases_warns_of_nothing(chain: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Run(chain).recorder:
            pass
