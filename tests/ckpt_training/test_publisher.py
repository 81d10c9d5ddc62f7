"""A live run of one process publishes the weights after each step, and nothing that goes wrong stops it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt_formats.core.errors import (
    InvalidArgumentError,
    LockedError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.universal.published.records import HEAD, Head, StepName
from ckpt_formats.universal.published.route import find_route
from ckpt_training import Publisher, PublisherWarning, copies
from ckpt_training.copies import HostCopies
from ckpt_training.local_shards import as_array
from saving_jobs.model import Model

SECONDS = 300.0


class Run:
    """A run, and the weights that it had after each step, cast by torch."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(
            [one for one in self.model.parameters() if one.requires_grad], 1e-2, foreach=False
        )
        self.truth: dict[int, dict[str, bytes]] = {}

    def step(self, publisher: Publisher) -> int:
        tokens = torch.randint(13, (9,))
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(tokens), tokens.roll(1)).backward()
        self.optimizer.step()
        self.truth[publisher.step] = self.state()
        return publisher.step

    def state(self) -> dict[str, bytes]:
        parameters = {name: one.to(torch.bfloat16) for name, one in self.model.named_parameters()}
        every = {**parameters, **dict(self.model.named_buffers())}
        return {name: as_array(one.detach().contiguous()).tobytes() for name, one in every.items()}

    def publisher(self, chain: Path, **options: Any) -> Publisher:
        options = {"names": "as-is", "memory": 1 << 18, "stall_seconds": SECONDS, **options}
        return Publisher(self.model, self.optimizer, chain, **options)


def state_of(chain: Path, step: int) -> dict[str, bytes]:
    return {name: np.asarray(one.weight).tobytes() for name, one in ckpt.Chain(chain)[step].parameters.items()}


def epoch_of(chain: Path) -> int:
    return Head.from_bytes((chain / HEAD).read_bytes(), chain).record.name.epoch


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return tmp_path / "policy.chain"


def test_a_published_step_has_the_bits_of_the_model_as_torch_casts_them(run: Run, chain: Path) -> None:
    run.truth[0] = run.state()
    with run.publisher(chain) as publisher:
        assert publisher.wait(timeout=SECONDS).kind == "base"
        for number in range(9):
            if number == 3:
                run.optimizer.param_groups[0]["lr"] = 0.0  # so deltas are small, and no base comes before a fold
            result = publisher.wait(run.step(publisher), SECONDS)
    assert (result.step, result.epoch, publisher.skipped) == (9, 1, 0)
    assert {step: state_of(chain, step) for step in range(10)} == run.truth
    head = Head.from_bytes((chain / HEAD).read_bytes(), chain)
    assert head.folds[-1] == (head.base.step, head.base.step + 4)
    route = find_route(head, None, lambda key: (chain / key).read_bytes(), chain)
    assert route.records[1].key == StepName(1, head.base.step + 4).fold_key(head.base.step)
    assert ckpt.Chain(chain)[3].aliases == {"head.weight": "word.weight"}


def test_a_run_goes_on_in_its_epoch_and_an_older_state_begins_another_one(run: Run, chain: Path) -> None:
    def started(step: int) -> tuple[str, int]:
        with run.publisher(chain, step=step) as publisher:
            result = publisher.wait(timeout=SECONDS)
        return result.kind, result.epoch

    assert started(5) == ("base", 1)
    assert started(5) == ("same", 1)
    assert started(8) == ("base", 1)
    assert started(5) == ("base", 2)
    with torch.no_grad():
        run.model.gain.add_(1.0)
    assert started(5) == ("base", 3)
    assert epoch_of(chain) == 3


def test_steps_are_skipped_while_one_is_on_its_way(run: Run, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Gate(HostCopies):
        def copy(self, *arguments: Any) -> None:
            assert gate.wait(SECONDS)
            super().copy(*arguments)

    monkeypatch.setattr(copies, "copies_of", lambda device: Gate())
    gate.set()
    with run.publisher(chain, every=2) as publisher:
        publisher.wait(timeout=SECONDS)
        run.step(publisher)
        assert (publisher.skipped, publisher.published and publisher.published.step) == (0, 0)
        gate.clear()
        run.step(publisher)
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        before = time.monotonic()
        os.kill(publisher.writer_pid or 0, signal.SIGSTOP)
        run.step(publisher)  # waits for the copy of the state before it
        assert time.monotonic() - before > 0.1
        run.step(publisher)
        assert publisher.skipped == 1
        os.kill(publisher.writer_pid or 0, signal.SIGCONT)
        assert publisher.wait(timeout=SECONDS).step == 4  # the last state, although it had been skipped
    assert {step: state_of(chain, step) for step in (2, 4)} == {step: run.truth[step] for step in (2, 4)}


def test_a_killed_process_is_a_warning_and_the_next_step_is_published(run: Run, chain: Path) -> None:
    with run.publisher(chain) as publisher:
        publisher.wait(timeout=SECONDS)
        os.kill(publisher.writer_pid or 0, signal.SIGSTOP)
        run.step(publisher)
        os.kill(publisher.writer_pid or 0, signal.SIGKILL)
        with pytest.raises(OutputError, match="the process that writes the published steps has ended"):
            publisher.wait(timeout=SECONDS)
        with pytest.warns(PublisherWarning, match="later steps are tried"):
            run.step(publisher)
        assert publisher.wait(timeout=SECONDS).step == 2
        publisher.wait(run.step(publisher), SECONDS)
    assert {step: state_of(chain, step) for step in (2, 3)} == {step: run.truth[step] for step in (2, 3)}


KILLED = """
import sys
from pathlib import Path
import torch
from test_publisher import Run
run = Run()
torch.manual_seed(5)
with run.publisher(Path(sys.argv[1])) as publisher:
    publisher.wait()
    while True:
        run.step(publisher)
        torch.save(run.model.state_dict(), sys.argv[2] + f"/{publisher.step}.pt")
        print(publisher.step, flush=True)
"""


def test_a_killed_run_leaves_whole_steps_and_goes_on_from_an_older_one(run: Run, chain: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(chain), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    try:
        while int(process.stdout.readline()) < 20:
            pass
    finally:
        process.kill()
        process.wait()
    process.stdout.close()
    last = max(step for step in ckpt.Chain(chain) if (tmp_path / f"{step}.pt").exists())
    run.model.load_state_dict(torch.load(tmp_path / f"{last}.pt"))
    assert state_of(chain, last) == run.state()
    with run.publisher(chain, step=0) as publisher:  # its process waits for that of the killed run
        assert publisher.wait(timeout=SECONDS).epoch == 2
        publisher.wait(run.step(publisher), SECONDS)
    assert epoch_of(chain) == 2
    assert state_of(chain, 1) == run.truth[1]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    moved = folder.rename(folder.with_name("moved"))
    folder.write_text("in the way")
    yield
    folder.unlink()
    moved.rename(folder)


def test_a_store_that_fails_for_a_while_is_a_warning(run: Run, chain: Path) -> None:
    with run.publisher(chain) as publisher:
        publisher.wait(timeout=SECONDS)
        with read_only(chain / "published/objects"):
            run.step(publisher)
            with pytest.raises(ckpt.errors.CkptError, match="step 1 is not published"):
                publisher.wait(timeout=SECONDS)
        with pytest.warns(PublisherWarning):
            run.step(publisher)
        assert publisher.wait(timeout=SECONDS).step == 2
    assert state_of(chain, 2) == run.truth[2]


def test_publish_takes_the_weights_of_a_run_without_an_optimizer(run: Run, chain: Path) -> None:
    with Publisher(run.model, None, chain, dtype=None, names="as-is", step=10) as publisher:
        publisher.wait(timeout=SECONDS)
        with torch.no_grad():
            run.model.gain.fill_(7.0)
        publisher.publish(20)
        assert publisher.wait(timeout=SECONDS).step == 20
        with pytest.raises(InvalidArgumentError, match="not a number after 20"):
            publisher.publish(20)
    gain = ckpt.Chain(chain)[20]["gain"].weight
    assert (gain.dtype.name, float(np.asarray(gain))) == ("float32", 7.0)


def test_runs_that_cannot_be_published_are_refused(run: Run, chain: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the Hugging Face names of a Model are not known"):
        run.publisher(chain, names="hf")
    with pytest.raises(InvalidArgumentError, match="dtype='int8'"):
        run.publisher(chain, dtype="int8")
    with run.publisher(chain), pytest.raises(LockedError):
        Run().publisher(chain, stall_seconds=0.1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(OutputError, match="is not a published chain"):
        run.publisher(tmp_path / "other")


def test_a_step_is_done_once_all_optimizers_have_stepped(run: Run, chain: Path) -> None:
    class Inner(torch.optim.SGD):
        pass

    class Outer(Inner):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            with torch.no_grad():
                run.model.gain.add_(1.0)
            return loss

    Inner([run.model.gain])  # torch hooks the step of the base, too
    parameters = [one for one in run.model.parameters() if one.requires_grad and one is not run.model.gain]
    one, other = Outer([run.model.gain], 0.1), torch.optim.SGD(parameters, 0.1)
    with Publisher(run.model, [one, other], chain, names="as-is", stall_seconds=SECONDS) as publisher:
        publisher.wait(timeout=SECONDS)
        for done in range(1, 3):
            run.model(torch.arange(9)).sum().backward()
            other.step()
            assert publisher.step == done - 1
            one.step()
            assert publisher.wait(timeout=SECONDS).step == done
            run.truth[done] = run.state()
    assert {step: state_of(chain, step) for step in (1, 2)} == run.truth
