"""Saves of a live job of one process: each is the state at its step, whole or not there, and training goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, OutputError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_training import Saver, SaverWarning, copies, load
from ckpt_training.copies import HostCopies
from protect_campaign import contents_of
from saving_jobs import follow
from saving_jobs.model import Model

SECONDS = 300.0


class Run:
    """A run, and what its states were."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.model.word.weight], "lr": 3e-3},
                {"params": [*self.model.mix.parameters(), self.model.gain]},
            ],
            1e-2,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.count = 0
        self.truth: dict[int, dict[tuple[str, str], bytes]] = {}

    def step(self) -> float:
        tokens = torch.randint(13, (9,))  # of the generator, whose state is saved
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.count += 1
        self.truth[self.count] = self.state()
        return loss.item()

    def state(self) -> dict[tuple[str, str], bytes]:
        named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        state = {(name, "model"): one for name, one in named.items()}
        for name, one in self.model.named_parameters():
            state |= {(name, key): value for key, value in self.optimizer.state[one].items() if key != "step"}
        return {key: one.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for key, one in state.items()}

    def saver(self, target: Path, **options: Any) -> Saver:
        options = {"memory": 1 << 18, "stall_seconds": SECONDS, **options}  # slots of 64 KiB
        if target.name == "items":
            options["format"] = ckpt.DCP()
        return Saver(self.model, self.optimizer, target, scheduler=self.scheduler, **options)

    def check(self, checkpoint: ckpt.Checkpoint) -> None:
        """The checkpoint has the state of its step, all of it."""
        step = checkpoint.origin.step
        assert step is not None
        tensors = [row for row in checkpoint.tensors() if row[0].role != "extra"]
        stored = {(p.name, state): read(tensor).tobytes() for p, state, tensor in tensors}
        assert stored == self.truth[step]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture(params=["saves", "run.chain"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


class Gate(HostCopies):
    """Copies that begin when the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def copy(self, *arguments: Any) -> None:
        assert self.open.wait(SECONDS)
        super().copy(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    result = Gate()
    monkeypatch.setattr(copies, "copies_of", lambda device: result)
    return result


def opened(target: Path, step: int) -> ckpt.Checkpoint:
    return ckpt.open(f"{target}@{step}" if target.suffix == ".chain" else target / f"step-{step:08d}")


def findings(target: Path, step: int) -> list[object]:
    """What is wrong with a save, and in a chain with any."""
    if target.suffix == ".chain":
        return list(verify_chain(target, Execution(workers=1)).findings)
    return list(ckpt.verify(opened(target, step)).findings)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"chain.lock", "chain.json"}


@pytest.mark.parametrize("target", ["saves", "run.chain", "items"], indirect=True)
def test_every_save_is_the_state_of_its_step_and_a_run_goes_on_from_it(run: Run, target: Path) -> None:
    """The first save is before the first step, so that the optimizer has no states yet."""
    run.truth[0] = run.state()
    with run.saver(target, in_flight=2, plain={"epoch": 3, "rate": torch.tensor([0.5])}) as saver:
        handles = [saver.save(0)]
        for _ in range(4):
            run.step()
            handles.append(saver.save(run.count))
            assert handles[-1].step == run.count
        results = [handle.wait(SECONDS) for handle in handles]
        assert all(handle.done() for handle in handles)
    assert [result.step for result in results] == [0, 1, 2, 3, 4]
    in_chain = target.suffix == ".chain"
    assert [result.kind for result in results[1:]] == (["delta"] * 4 if in_chain else ["base"] * 4)
    for step, result in enumerate(results):
        checkpoint = opened(target, step)
        run.check(checkpoint)
        assert checkpoint.aliases == {"head.weight": "word.weight"}
        assert Path(result.path).is_dir()
        assert [group.names for group in checkpoint.groups] == [
            ("word.weight",),
            ("mix.weight", "mix.bias", "gain"),
        ]
    assert findings(target, 4) == []
    losses = [run.step() for _ in range(2)]
    other = Run()
    loaded = load(opened(target, 4), other.model, other.optimizer, scheduler=other.scheduler)
    assert loaded.step == 4
    assert loaded.extras["plain"]["epoch"] == 3
    assert loaded.extras["plain"]["rate"].tolist() == [0.5]
    assert [other.step() for _ in range(2)] == losses
    assert len(names_in(target)) == 5


def test_an_update_waits_until_the_state_before_it_is_copied(run: Run, target: Path, gate: Gate) -> None:
    run.step()
    with run.saver(target) as saver:
        handle = saver.save(1)
        threading.Timer(0.3, gate.open.set).start()
        run.step()
        assert saver.waited > 0.2
        handle.wait(SECONDS)
    run.check(opened(target, 1))


def test_a_tensor_that_is_changed_while_it_is_copied_is_named_and_nothing_is_published(
    run: Run, target: Path, gate: Gate
) -> None:
    run.step()
    with run.saver(target) as saver:
        handle = saver.save(1)
        with torch.no_grad():
            run.model.mix.bias.add_(1)
        gate.open.set()
        with pytest.raises(CkptError, match=r"`mix.bias` \(model\) was changed outside the optimizer"):
            handle.wait(SECONDS)
        with pytest.raises(CkptError, match=r"`mix\.bias`"):
            _ = handle.result
        run.step()
        assert saver.save(2).wait(SECONDS).kind == "base"
    assert len(names_in(target)) == 1
    run.check(opened(target, 2))


def test_a_run_with_other_tensors_is_refused_until_there_is_a_new_saver(run: Run, target: Path) -> None:
    run.step()
    with run.saver(target) as saver:
        run.optimizer.add_param_group({"params": [run.model.norm.weight]})
        saver.save(1)
        with pytest.warns(SaverWarning, match="step 1 is not saved: the optimizer steps other tensors than when"):
            second = saver.save(2)
        assert second.done()
        with pytest.raises(UnsupportedError, match="step 2 is not saved"):
            second.wait()
        run.model.more = nn.Linear(2, 2)
        with pytest.raises(UnsupportedError, match="the model has another part than of `more"):
            saver.save(3).wait(SECONDS)
    with run.saver(target) as saver:
        run.truth[4] = run.state()
        saver.save(4).wait(SECONDS)
    run.check(opened(target, 4))


def test_a_slow_save_makes_the_next_one_wait_or_skips_it(run: Run, target: Path, gate: Gate) -> None:
    run.step()
    with run.saver(target, when_slow="skip") as saver:
        first = saver.save(1)
        with pytest.warns(SaverWarning, match="step 2 is not saved: the save of step 1 is still in progress"):
            second = saver.save(2)
        assert second.done()
        assert second.wait().skipped == "the save of step 1 is still in progress"
        assert first.result is None
        assert not first.done()
        with pytest.raises(TimeoutError):
            first.wait(0.01)
        gate.open.set()
        first.wait(SECONDS)
        run.step()
        saver.save(3)
    run.truth[3] = run.truth[2]
    for step in (1, 3):
        run.check(opened(target, step))
    assert len(names_in(target)) == 2


def test_a_killed_process_fails_its_save_and_the_next_save_has_another(run: Run, target: Path, gate: Gate) -> None:
    run.step()
    gate.open.set()
    with run.saver(target) as saver:
        saver.save(1).wait(SECONDS)
        gate.open.clear()
        run.step()
        handle = saver.save(2)
        assert saver.writer_pid is not None
        os.kill(saver.writer_pid, signal.SIGKILL)
        gate.open.set()
        with pytest.raises(OutputError, match="step 2 is not saved: the process that writes the saves has ended"):
            handle.wait(SECONDS)
        run.step()
        assert saver.save(3).wait(SECONDS).kind == "base"
    run.check(opened(target, 3))
    assert findings(target, 3) == []
    with run.saver(target):
        assert len(names_in(target)) == 2  # what the killed process has left is removed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("name", ["saves", "run.chain"])
def test_a_full_disk_fails_the_save_and_training_goes_on(run: Run, small_disk: Path, name: str) -> None:
    target, ballast = small_disk / name, small_disk / "ballast"
    ballast.write_bytes(bytes((1 << 20) - (40 << 10)))
    run.step()
    with run.saver(target) as saver:
        with pytest.raises(CkptError, match=r"step 1 is not saved: .*No space left"):
            saver.save(1).wait(SECONDS)
        ballast.unlink()
        run.step()
        saver.save(2).wait(SECONDS)
    run.check(opened(target, 2))
    assert len(names_in(target)) == 1


def test_a_part_without_a_state_fails_its_save_and_a_saved_step_is_not_replaced(run: Run, target: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            if run.count == 1:
                raise RuntimeError("no state now")
            return {}

    run.step()
    with run.saver(target, broken=Broken()) as saver:
        with pytest.raises(UnsupportedError, match="step 1 is not saved: RuntimeError: no state now"):
            saver.save(1).wait(SECONDS)
        run.step()
        saver.save(2).wait(SECONDS)
        with pytest.raises(CkptError, match="step 2 was saved already"):
            saver.save(2).wait(SECONDS)
    run.check(opened(target, 2))
    with pytest.raises(InvalidArgumentError, match="the Saver is closed"):
        saver.save(3)


def test_a_job_follows_each_save_and_its_failure_leaves_the_save_as_it_is(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "saves"
    saver = run.saver(target, then=partial(follow.note, suffix=".txt"))
    assert saver.save(0).wait_then(SECONDS).step == 0
    for step, reason in ((2, "ValueError: no step 2"), (3, "its process has ended with 7")):
        run.step()
        handle = saver.save(step)
        with pytest.raises(OutputError, match=f"step {step} is saved, but the job after it failed: {reason}"):
            handle.wait_then(SECONDS)
        assert handle.wait(SECONDS).kind == "base"
        assert findings(target, step) == []
    saver.save(5)
    saver.save(12)
    with pytest.warns(SaverWarning, match="step 12 is saved, but the job after it failed: ValueError: no step 2"):
        saver.close()
    assert names_in(target) == {*(f"step-{n:08d}" for n in (0, 2, 3, 5, 12)), "step-00000000.txt", "step-00000005.txt"}
    assert int((target / "step-00000005.txt").read_text()) == len(names_in(target / "step-00000005"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["run.chain", "items"], indirect=True)
def test_a_protected_save_appears_with_the_parity_that_protect_writes(run: Run, target: Path) -> None:
    with run.saver(target, protect=1) as saver:
        for _ in range(2):
            run.step()
            saver.save(run.count).wait(SECONDS)
    folder = sorted(target.glob("step-*"))[-1]
    parity = contents_of(folder / ".ckpt-parity")
    ckpt.protect(folder, 1, overwrite=True)
    assert contents_of(folder / ".ckpt-parity") == parity
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and ".ckpt-parity" not in path.parts):
        path.unlink()
        assert [one.path for one in ckpt.repair(folder).damaged] == [path]
    run.check(opened(target, 2))
    assert findings(target, 2) == []


def test_bases_of_a_chain_come_as_its_policy_says(run: Run, tmp_path: Path) -> None:
    kinds = []
    with run.saver(tmp_path / "run.chain", policy=DeltaPolicy(base_every=2)) as saver:
        for step in range(1, 5):
            run.step()
            kinds.append(saver.save(step).wait(SECONDS).kind)
    assert kinds == ["base", "delta", "base", "delta"]
    run.check(opened(tmp_path / "run.chain", 4))


def test_options_that_cannot_be_are_refused(run: Run, tmp_path: Path) -> None:
    for options, message in (
        ({"in_flight": 0}, "in_flight must be a whole number from 1"),
        ({"when_slow": "never"}, "when_slow must be"),
        ({"memory": 1000}, "memory must be a whole number at least 262,144"),
        ({"policy": DeltaPolicy()}, "`policy` is for chains"),
        ({"protect": 0}, "protect must be a whole number from 1 to 32"),
        ({"protect": True}, "protect must be a whole number from 1 to 32"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            run.saver(tmp_path / "saves", **options)
    for job, message in (
        (lambda path: None, "another process cannot import"),
        (partial(follow.note, "path"), "gets the path as its first argument"),
        (partial(follow.note, suffix=b".txt"), "arguments that are not plain"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            run.saver(tmp_path / "saves", then=job)
    with pytest.raises(UnsupportedError, match="without loss"):
        run.saver(tmp_path / "run.chain", policy=DeltaPolicy("subspace:step_size=0.5"))
    with pytest.raises(UnsupportedError, match="keys='accelerate'"):
        run.saver(tmp_path / "saves", format=ckpt.DCP(keys="accelerate"))
    with pytest.raises(InvalidArgumentError, match="format must be a Universal or a DCP or None"):
        run.saver(tmp_path / "saves", format=ckpt.HuggingFace())
    with pytest.raises(InvalidArgumentError, match="the ranks of the run write"):
        run.saver(tmp_path / "saves", format=ckpt.DCP(dp=2))
    assert names_in(tmp_path) == set()


KILLED = """
import os, signal, sys, torch
torch.set_num_threads({threads})  # sums are rounded otherwise with other numbers of threads
sys.path[:0] = {paths!r}
from pathlib import Path
from ckpt_training import copies
from test_saver import Gate, Run
gate, run = Gate(), Run()
gate.open.set()
copies.copies_of = lambda device: gate
saver = run.saver(Path({target!r}))
run.step()
saver.save(1).wait(60)
run.step()
{first}
handle = saver.save(2)
{last}
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("name", "is_copied"), [("saves", True), ("run.chain", True), ("run.chain", False)])
def test_a_save_of_a_killed_trainer_is_published_if_all_was_copied(tmp_path: Path, name: str, is_copied: bool) -> None:
    target = tmp_path / name
    first = "" if is_copied else "gate.open.clear()"
    last = "handle._snapshot.copied.wait(60); import time; time.sleep(0.2)" if is_copied else ""
    paths, threads = [str(Path(__file__).parent)], torch.get_num_threads()
    script = KILLED.format(paths=paths, threads=threads, target=str(target), first=first, last=last)
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    run = Run()
    run.step()
    run.step()
    deadline = time.monotonic() + SECONDS
    while any(path.name.startswith(".step") for path in target.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)  # the process ends what it has
    steps = (1, 2) if is_copied else (1,)
    assert len(names_in(target)) == len(steps)
    for step in steps:
        run.check(opened(target, step))
