"""Recording on disks that are full or slow, beside writers that die, into chains that others have: training goes on."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_formats.core.errors import CkptError, IncompleteError, LockedError, OutputError, UnsupportedError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, folder, states
from ckpt_recorder import Recorder, RecorderWarning, recording, segments
from ckpt_recorder.recording import RankRecording
from ckpt_training.writing import link
from ckpt_training.writing.trainer_messages import MessagesEnd, TrainerMessages
from damage import ckpt
from killing import killed, points
from small_disk import mounted

WIDTH = 96
SECONDS = 30


class Run:
    """A run of one rank, and its state after each step."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # it is forked
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        self.truth = [self._state()]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            random = torch.Generator().manual_seed(len(self.truth))
            for parameter in self.net.parameters():  # no backward: forks of this process are to step, too
                parameter.grad = torch.randn(parameter.shape, generator=random)
            self.optimizer.step()
            self.truth.append(self._state())

    def _state(self) -> dict[str, bytes]:
        kept = {name: tensor.detach().numpy().tobytes() for name, tensor in self.net.named_parameters()}
        for name, parameter in self.net.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            kept |= {f"{name}.{s}": moments[s].numpy().tobytes() for s in ("exp_avg", "exp_avg_sq") if s in moments}
        return kept

    def check(self, chain: Path, step: int) -> None:
        """The restored state is that of the run."""
        checkpoint = states.open_state(chain, chain_file.load(chain / chain_file.NAME), step)
        kept = {
            name if state == "model" else f"{name}.{state}": read(tensor).tobytes()
            for name, parameter in checkpoint.parameters.items()
            for state, tensor in parameter.states.items()
        }
        assert {name: kept[name] for name in self.truth[step]} == self.truth[step]
        assert not any(np.frombuffer(kept[name], np.uint8).any() for name in kept.keys() - self.truth[step].keys())


def last_of(chain: Path) -> int:
    return states.last_step(chain, chain_file.load(chain / chain_file.NAME))


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return tmp_path / "run.chain"


def faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(recording, "WRITER", "faulty_writer")
    monkeypatch.setenv("RECORDING_FAULT", fault)


def recorded(run: Run, chain: Path, **options: Any) -> Recorder:
    options = {"random_states": False, "slots": 2, "retry": 0, "step": len(run.truth) - 1, **options}
    return Recorder(run.net, run.optimizer, chain, **options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted(tmp_path / "disk", "2m") as disk:
        yield disk


def test_on_a_full_disk_training_goes_on_and_recording_begins_anew(run: Run, small_disk: Path) -> None:
    chain, ballast = small_disk / "run.chain", small_disk / "ballast"
    ballast.write_bytes(bytes(3 << 19))
    recorder = recorded(run, chain, retry=30)
    with pytest.warns(RecorderWarning, match="No space left on device") as warned:
        run.step(29)
    assert len(warned) == 1
    assert recorder.broken == "No space left on device"
    whole = last_of(chain)
    assert 1 <= whole < 29
    run.check(chain, whole)
    run.step()  # there is no room to begin anew
    assert recorder.broken is not None
    ballast.unlink()
    run.step(30)
    assert recorder.broken is None
    run.step(4)
    recorder.close()
    assert [one.first for one in chain_file.load(chain / chain_file.NAME).segments] == [0, 60]
    assert last_of(chain) == 64
    for step in (0, whole, 60, 61, 64):
        run.check(chain, step)
    with pytest.raises(CkptError, match=f"no step {whole + 1}"):
        run.check(chain, whole + 1)
    assert not folder.leftovers(chain, chain_file.load(chain / chain_file.NAME))


@pytest.mark.slow
def test_a_disk_that_is_full_at_once_is_an_error_that_leaves_nothing(
    run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        for room in (0, 30, 64, 200, 20_000):
            faulty(full, f"full {room}")
            with pytest.raises(OutputError, match="No space left"):
                recorded(run, chain)
            assert not chain.exists()
    with recorded(run, chain):
        run.step(2)
    run.check(chain, 2)


def test_a_broken_recording_can_stop_the_training(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "full 300000")
    recorder = recorded(run, chain, when_broken="raise")
    with pytest.raises(OutputError, match="No space left"):
        run.step(40)
    recorder.close()
    assert 1 <= last_of(chain) <= len(run.truth)
    run.check(chain, min(last_of(chain), len(run.truth) - 1))


@pytest.mark.slow
def test_on_a_slow_disk_steps_wait_for_room_and_memory_does_not_grow(
    run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "slow 0.15")
    with recorded(run, chain, slots=3) as recorder:
        run.step(4)
        before, waited = _memory(), []
        for _ in range(6):  # the ring is full: a step takes as long as its write
            began = time.monotonic()
            run.step()
            waited.append(time.monotonic() - began)
        assert 0.2 < np.median(waited) < 0.6  # a step that is proved has two records
        time.sleep(1.4)
        for _ in range(6):  # steps that are longer than the writes do not wait
            time.sleep(0.5)
            began = time.monotonic()
            run.step()
            waited.append(time.monotonic() - began)
        assert np.median(waited[6:]) < 0.05
        assert _memory() - before < 4 << 20
        assert recorder.broken is None
    assert last_of(chain) == 16
    run.check(chain, 16)


def _memory() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Scaled(nn.Linear):
    """A module with a state of its own."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}


@pytest.mark.slow
def test_a_segment_after_a_broken_one_begins_with_the_extra_states_of_modules(run: Run, chain: Path) -> None:
    scaled = _Scaled(WIDTH, WIDTH)
    scaled.load_state_dict({**run.net[0].state_dict(), "_extra_state": None}, strict=False)
    run.net[0] = scaled
    run.optimizer = torch.optim.AdamW(run.net.parameters(), lr=1e-2, fused=True)
    recorder = recorded(run, chain, retry=10)
    run.step(3)
    assert recorder.writer_pid is not None
    os.kill(recorder.writer_pid, signal.SIGKILL)
    scaled.count = 7
    with pytest.warns(RecorderWarning, match="every 10 steps"):
        run.step(7)
    scaled.count = 8
    run.step()
    recorder.close()
    for step, count in ((10, 7), (11, 8)):
        checkpoint = states.open_state(chain, chain_file.load(chain / chain_file.NAME), step)
        assert checkpoint.extras["0._extra_state"] == {"count": count}
    run.check(chain, 10)


def test_a_writer_that_dies_is_said_once_and_followed_by_another(run: Run, chain: Path) -> None:
    recorder = recorded(run, chain, retry=10)
    run.step(3)
    assert recorder.writer_pid is not None
    os.kill(recorder.writer_pid, signal.SIGKILL)
    with pytest.warns(RecorderWarning, match="every 10 steps") as warned:
        run.step(6)
    assert len(warned) == 1
    assert recorder.broken == "the process that writes the log has ended"
    assert recorder.writer_pid is None
    whole = last_of(chain)
    assert 1 <= whole <= 3  # of three, two may still have been in the ring
    run.step(1)
    assert recorder.broken is None
    run.step(5)
    recorder.close()
    assert recorder.broken is None
    for step in (whole, 10, 11, 15):
        run.check(chain, step)


def test_a_writer_that_dies_as_the_run_ends_is_noticed(run: Run, chain: Path) -> None:
    recorder = recorded(run, chain)
    run.step(3)
    assert recorder.writer_pid is not None
    os.kill(recorder.writer_pid, signal.SIGKILL)
    with pytest.warns(RecorderWarning, match="step 3 and later steps") as warned:
        recorder.close()
    assert len(warned) == 1
    assert recorder.broken == "the process that writes the log has ended"


def test_what_fails_at_the_very_end_is_said(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last flush, say; or the process dies after the last order."""
    recorder = recorded(run, chain)
    run.step(3)
    close = link.WriterLink.close

    def fail(self: link.WriterLink) -> None:
        close(self)
        self._reason = "Input/output error"

    monkeypatch.setattr(link.WriterLink, "close", fail)
    with pytest.warns(RecorderWarning, match="Input/output error"):
        recorder.close()
    assert recorder.broken == "Input/output error"


def test_while_its_writer_stands_still_a_step_waits(run: Run, chain: Path) -> None:
    recorder = recorded(run, chain)
    run.step(2)
    assert recorder.writer_pid is not None
    os.kill(recorder.writer_pid, signal.SIGSTOP)
    stepping = threading.Thread(target=lambda: run.step(6))
    stepping.start()
    time.sleep(0.5)
    done = len(run.truth)
    time.sleep(0.3)
    assert stepping.is_alive()
    assert len(run.truth) == done <= 1 + 2 + 2  # what the ring holds
    os.kill(recorder.writer_pid, signal.SIGCONT)
    stepping.join(SECONDS)
    recorder.close()
    assert last_of(chain) == 8
    run.check(chain, 8)


def wait_for(is_so: Callable[[], bool]) -> None:
    """Until something is so."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_training_goes_on_without_a_writer_that_is_stuck(run: Run, chain: Path) -> None:
    """As on a file server that does not answer: what it was given before counts."""
    recorder = recorded(run, chain, stall_seconds=0.5)
    run.step(2)
    pid = recorder.writer_pid
    assert pid is not None
    wait_for(lambda: last_of(chain) == 2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.warns(RecorderWarning, match="makes no progress"):
            run.step(8)
        assert "hang" in str(recorder.broken)
        assert len(run.truth) == 11
        began = time.monotonic()
        recorder.close()
        assert time.monotonic() - began < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: last_of(chain) == 4)  # what the two slots of the ring held is written in the end
    run.check(chain, 4)


def _begun(run: Run, chain: Path) -> None:
    recorded(run, chain)


@pytest.mark.slow
def test_killed_at_any_point_of_its_beginning_a_chain_is_good(run: Run, chain: Path, tmp_path: Path) -> None:
    """In front of each change that the trainer makes to the file system."""
    run.step(2)
    with recorded(run, chain):
        run.step(2)
    count = points(lambda: _begun(run, chain), tmp_path)
    named = set[int]()
    for point in range(2 * count):  # what is to be swept makes the way longer
        _await_writers(chain)
        before = len(chain_file.load(chain / chain_file.NAME).segments)
        was_killed = killed(lambda: _begun(run, chain), tmp_path, point)
        _await_writers(chain)
        listed = chain_file.load(chain / chain_file.NAME)
        named.add(len(listed.segments) - before)
        for step in (3, 4):
            run.check(chain, step)
        assert all((chain / one.folder).is_dir() for one in listed.segments)
        if not was_killed:
            break
    assert point > count
    assert named == {0, 1}
    with recorded(run, chain):
        run.step(2)
    run.check(chain, 6)
    assert not folder.leftovers(chain, chain_file.load(chain / chain_file.NAME))


def _await_writers(chain: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(folder.is_growing, chain.glob("gradients-*"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_at_any_point_of_its_beginning_a_new_chain_is_absent_or_good(
    run: Run, chain: Path, tmp_path: Path
) -> None:
    point = 0
    while True:
        chain = tmp_path / f"{point}.chain"
        if not killed(lambda: _begun(run, chain), tmp_path, point):  # noqa: B023
            break
        _await_writers(chain)
        if (chain / chain_file.NAME).exists():
            run.check(chain, 0)
        if point % 3 == 0:
            with recorded(run, chain):
                pass
            run.check(chain, 0)
            assert not folder.leftovers(chain, chain_file.load(chain / chain_file.NAME))
        point += 1
    assert point > 8


ERRORS = (OutputError("no luck"), OSError(5, "Input/output error"), ValueError("no luck"))


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        # Of the places with a handler in common, one has all errors.
        *((RankRecording, "record_fingerprint", error) for error in ERRORS),
        *((FolderPlace, "replace", error) for error in ERRORS),
        *((segments, "_write_layout", error) for error in ERRORS),
        (RankRecording, "__init__", ERRORS[2]),
        (RankRecording, "record_start", ERRORS[1]),
        (RankRecording, "wait_until_flushed", ERRORS[0]),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else repr(value)),
)
@pytest.mark.quick(6)
def test_what_fails_as_it_begins_leaves_no_segment_and_no_writer(
    place: Any, name: str, error: Exception, run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = []
    started = link.start_process

    def start(*arguments: Any, **named: Any) -> Any:
        process = started(*arguments, **named)
        pids.append(process)
        return process

    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(link, "start_process", start)
        failing.setattr(place, name, fail)
        with pytest.raises(CkptError, match=r"no luck|Input/output error"):
            recorded(run, chain)
    assert all(process.poll() is not None for process in pids)
    assert not (chain / chain_file.NAME).exists()
    with recorded(run, chain):
        run.step()
    run.check(chain, 1)
    assert len(list(chain.glob("gradients-*"))) == 1


def test_two_runs_do_not_record_into_one_chain(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_DRAIN_SECONDS", 0.3)
    other = Run()
    with recorded(run, chain):
        run.step(2)
        with pytest.raises(LockedError, match="another run is recording"):
            recorded(other, chain)
        run.step(2)
    assert len(list(chain.glob("gradients-*"))) == 1
    run.check(chain, 4)


def test_later_steps_are_not_recorded_over(run: Run, chain: Path) -> None:
    with recorded(run, chain):
        run.step(3)
    with pytest.raises(UnsupportedError, match="steps up to 3, and the run is at step 2") as refused:
        recorded(run, chain, step=2)
    assert refused.value.hint is not None
    assert f"ckpt compact {chain} --upto 2" in refused.value.hint
    assert len(list(chain.glob("gradients-*"))) == 1
    assert ckpt("compact", chain, "--upto", 2).code == 0
    with recorded(run, chain, step=2):
        run.step(2)
    assert last_of(chain) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.pop("optimizer"), "'exp_avg' of `0.weight` differs"),
        (lambda content: content["model"]["1.bias"].add_(1), "`1.bias` differs"),
        (lambda content: content["model"].pop("0.weight"), r"it has no `0.weight` of shape \[96, 96\]"),
        (lambda content: None, None),
    ],
    ids=["no-optimizer", "another-weight", "a-tensor-less", "the-same"],
)
def test_a_log_does_not_begin_with_a_state_that_is_not_the_runs(
    change: Any, reason: str | None, run: Run, chain: Path
) -> None:
    run.step(2)
    content = deepcopy({"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict(), "step": 2})
    change(content)
    torch.save(content, chain.parent / "saved.pt")
    assert ckpt("append", chain, chain.parent / "saved.pt").code == 0
    if reason is not None:
        with pytest.raises(UnsupportedError, match=f"has at step 2 is not that of the run: {reason}"):
            recorded(run, chain, step=2)
        return
    with recorded(run, chain, step=2):
        run.step(2)
    restored = states.open_state(chain, chain_file.load(chain / chain_file.NAME), 4).parameters["1.bias"].states
    assert read(restored["model"]).tobytes() == run.truth[4]["1.bias"]
    assert read(restored["exp_avg"]).tobytes() == run.truth[4]["1.bias.exp_avg"]


def test_leftovers_are_swept_by_recorders_and_by_commands_but_not_those_that_grow(run: Run, chain: Path) -> None:
    with recorded(run, chain):
        run.step()
    stray = chain / "gradients-0000000099"
    stray.mkdir()
    (stray / "rank-00000.ckg").write_bytes(b"x")
    with recorded(run, chain):
        run.step()
    assert not stray.exists()
    draft = states.open_steps(chain, chain_file.load(chain / chain_file.NAME).segments[-1]).layout
    _await_writers(chain)
    begun = segments.begin(
        chain, type(draft)(*[{"first": 2}.get(f, getattr(draft, f)) for f in draft.__dataclass_fields__])
    )
    saved = chain.parent / "saved.pt"
    torch.save({"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict(), "step": 2}, saved)
    done = ckpt("append", chain, saved)
    assert done.code == 0, done.err
    assert begun.path.exists()
    os.close(begun.lock)
    run.step()
    torch.save({"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict(), "step": 3}, saved)
    assert ckpt("append", chain, saved).code == 0
    assert not begun.path.exists()


@pytest.mark.slow
def test_recorder_refuses_to_go_on_without_the_file_of_a_rank_and_restored_files_count(run: Run, chain: Path) -> None:
    with recorded(run, chain):
        run.step(2)
    _await_writers(chain)
    listed, (file,) = (chain / chain_file.NAME).read_bytes(), chain.glob("*/rank-00000.ckg")
    elsewhere = file.rename(chain.parent / "elsewhere.ckg")
    with pytest.raises(IncompleteError, match=r"rank-00000\.ckg is missing"):
        recorded(run, chain, step=0)
    assert (chain / chain_file.NAME).read_bytes() == listed
    elsewhere.rename(file)
    with recorded(run, chain, step=2):
        run.step()
    run.check(chain, 3)


def test_children_of_the_trainer_do_not_keep_its_writer(run: Run, chain: Path) -> None:
    """A worker of a loader that is forked while a run is recorded has the pipe to the writer open."""
    recorder = recorded(run, chain)
    run.step(2)
    child = os.fork()
    if not child:
        time.sleep(SECONDS)
        os._exit(0)
    try:
        began = time.monotonic()
        recorder.close()
        assert time.monotonic() - began < SECONDS / 3
        run.check(chain, 2)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_children_of_a_killed_trainer_do_not_keep_its_writer(run: Run, chain: Path) -> None:
    reading_end, tell = os.pipe()
    trainer = os.fork()
    if not trainer:
        try:
            _recorder = recorded(run, chain)
            run.step(5)
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
            time.sleep(SECONDS)
        finally:
            os._exit(1)
    child = int(os.read(reading_end, 100))
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        began = time.monotonic()
        _await_writers(chain)
        assert time.monotonic() - began < SECONDS / 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading_end)
        os.close(tell)
    run.step(5)
    assert last_of(chain) == 5
    run.check(chain, 5)


def test_many_open_files_do_no_harm(run: Run, chain: Path) -> None:
    """`select` knows no descriptors from 1,024 on."""
    kept = [os.dup(1) for _ in range(1030)]
    try:
        with recorded(run, chain) as recorder:
            run.step(2)
        assert recorder.broken is None
    finally:
        for file in kept:
            os.close(file)
    run.check(chain, 2)


def test_half_an_order_is_none() -> None:
    for sent, whole in {
        b'{"a":1}\n{"nbytes":4}\nabcd': 2,
        b'{"a":1}\n{"nbytes":4}\nabc': 1,
        b'{"a":1}\n{"nbytes":4}': 1,
        b'{"a":1}\n{"nby': 1,
        b"": 0,
    }.items():
        orders, tell = os.pipe()
        os.write(tell, sent)
        os.close(tell)
        reader = TrainerMessages(orders, os.getppid())
        for _ in range(whole):
            assert reader.next(0.01) is not None
        with pytest.raises(MessagesEnd):
            reader.next(0.01)
        os.close(orders)
    orders, tell = os.pipe()
    reader = TrainerMessages(orders, os.getppid())
    assert reader.next(0.01) is None
    os.write(tell, b'{"nbytes":3}\nab')
    threading.Timer(0.1, lambda: os.write(tell, b'c{"end":true}\n')).start()
    assert reader.next(0.01) == ({"nbytes": 3}, b"abc")
    assert reader.next(1) == ({"end": True}, b"")
    elsewhere = TrainerMessages(orders, 0)  # whose trainer is gone
    os.write(tell, b'{"a":1}\n{"b"')
    assert elsewhere.next(0.01) == ({"a": 1}, b"")
    with pytest.raises(MessagesEnd):
        elsewhere.next(0.01)
    os.close(orders)
    os.close(tell)


def test_an_interrupted_order_ends_the_log_before_it(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(run, chain)
    run.step(3)
    write = os.write

    def interrupted(file: int, data: Any) -> int:
        if len(data) > 50:
            write(file, data[:40])
            raise KeyboardInterrupt
        return write(file, data)

    with monkeypatch.context() as interrupting:
        interrupting.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder.close()
    assert recorder.broken is not None
    assert last_of(chain) == 3
    run.check(chain, 3)


def test_optimizers_of_two_kinds_step_in_turn(run: Run, chain: Path) -> None:
    """Each call is a step; what one keeps, the other does not."""
    adam = torch.optim.AdamW(run.net[0].parameters(), lr=1e-2, fused=True)
    sgd = torch.optim.SGD(run.net[1].parameters(), lr=1e-1, momentum=0.9)
    truth = []
    with Recorder(run.net, [adam, sgd], chain):
        for step in range(6):
            for parameter in run.net.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 + step)
            (adam, sgd)[step % 2].step()
            kept = {(name, "model"): tensor.detach().numpy().tobytes() for name, tensor in run.net.named_parameters()}
            for name, parameter in run.net.named_parameters():
                for optimizer in (adam, sgd):
                    for state, values in optimizer.state.get(parameter, {}).items():
                        if state != "step":
                            kept[name, state] = values.numpy().tobytes()
            truth.append(kept)
    for step, kept in enumerate(truth, 1):
        checkpoint = states.open_state(chain, chain_file.load(chain / chain_file.NAME), step)
        restored = {(p.name, state): read(tensor).tobytes() for p, state, tensor in checkpoint.tensors()}
        assert {key: restored[key] for key in kept} == kept
        extra = restored.keys() - kept.keys()  # of what the second one has not stepped yet
        assert not extra if step > 1 else {state for _, state in extra} <= {"exp_avg", "exp_avg_sq", "momentum_buffer"}


def test_what_is_flushed_after_a_failure_is_a_failure(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's words may all come at once: that it is broken, and that there is nothing left to flush."""
    recorder = recorded(run, chain)
    listen = link.WriterLink._listen

    def late(self: link.WriterLink, seconds: float) -> None:
        listen(self, seconds)
        if self.messages:
            self._reason = "Input/output error"

    assert recorder._run.log.recording is not None
    with monkeypatch.context() as failing:
        failing.setattr(link.WriterLink, "_listen", late)
        with pytest.raises(link.WriterBroken, match="Input/output error"):
            recorder._run.log.recording.wait_until_flushed()
    with pytest.warns(RecorderWarning):
        recorder.close()


def test_where_a_segment_for_more_tensors_cannot_begin_training_goes_on(
    run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is added as the run goes on; the disk is full by then."""
    more = nn.Linear(WIDTH, 2)
    model = nn.ModuleList([run.net, more])
    recorder = recorded(run, chain, retry=5)
    recorder._run.model = model
    run.step(2)
    run.optimizer.add_param_group({"params": list(more.parameters())})
    for parameter in more.parameters():
        parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as full:
        faulty(full, "full 100")
        with pytest.warns(RecorderWarning, match="No space left"):
            run.optimizer.step()
    assert recorder.broken is not None
    assert last_of(chain) == 2
    for _ in range(6):
        run.optimizer.step()
    assert recorder.broken is None
    recorder.close()
    assert last_of(chain) == 9
    assert "1.weight" in states.open_state(chain, chain_file.load(chain / chain_file.NAME), 9).parameters


def test_signals_that_end_a_job_leave_the_writer_to_its_work(run: Run, chain: Path) -> None:
    recorder = recorded(run, chain)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert recorder.writer_pid is not None
        os.kill(recorder.writer_pid, number)
        run.step()
    recorder.close()
    assert recorder.broken is None
    assert last_of(chain) == 3
