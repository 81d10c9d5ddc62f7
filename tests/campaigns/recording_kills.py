"""kill -9 while a run is recorded: which steps can be restored, and are they what the run had?

A run of two ranks that nobody records or kills notes a hash of its whole state after each step. Of each killed run,
the last step and one before it are restored, and must have the hashes of those steps. The runs are of three ways: their
steps are recorded as gradients, as updates, or as gradients for weights in bfloat16. torch is imported once; every run
is a fork of this process, which itself must not compute with torch.
"""

import gc
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which the first step of an optimizer would import in each run
import xxhash
from torch import distributed, nn

from ckpt_formats.core.errors import CkptError, NotFoundError
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, folder, states
from ckpt_formats.universal.gradients.record import HEAD
from ckpt_formats.universal.gradients.segment import Segment, rank_file
from ckpt_recorder import Recorder
from damage import ckpt
from run import Round

STEPS, SHORT, FIRST = 100, 12, 4
"""Of a run; of one that is killed where it ends; of the first segment, where the second one's beginning is hit."""
RETRY = 40
SECONDS = 300
"""What a run or a writer may take to end: with many processes beside it, a hundred times as long as alone."""
BEGINNING, STEPPING, CLOSING, CLOSED = 1, 2, 10, 11


class Net(nn.Module):
    """With a buffer, and a draw of random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Linear(48, 5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.into(values.to(self.into.weight.dtype)))
        result: torch.Tensor = self.out(nn.functional.dropout(hidden, 0.1)).float()
        return result


def trainer(way: str) -> tuple[Net, torch.optim.Optimizer]:
    """The model and the optimizer whose steps are recorded in a way."""
    torch.manual_seed(1)
    net = Net().bfloat16() if way == "half" else Net()
    if way == "update":
        return net, torch.optim.Adafactor(net.parameters(), lr=1e-2)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


class Progress:
    """Memory in which the ranks of a run say how far they are."""

    def __init__(self) -> None:
        self._all = np.frombuffer(mmap.mmap(-1, 4096), np.int64).reshape(2, -1)

    def say(self, rank: int, place: int, value: int) -> None:
        self._all[rank, place] = value

    def phase(self) -> int:
        return int(self._all[:, 0].min())

    def done(self) -> list[int]:
        return list(map(int, self._all[:, 1]))

    def writers(self) -> list[int]:
        return [pid for pid in map(int, self._all[:, 2]) if pid]


@dataclass(frozen=True)
class Plan:
    """One round: who is killed, when, and what is done to the files then."""

    victims: str
    moment: str
    based: bool
    """Does the chain begin with the state at step 0?"""
    damage: str = "none"
    way: str = "replay"
    """How steps are recorded: as gradients, those of weights in bfloat16 (`half`), or as updates."""

    @property
    def steps(self) -> int:
        return SHORT if self.moment == "close" else STEPS

    @property
    def segments(self) -> list[int]:
        """The steps at which recorders begin."""
        return [0, FIRST] if self.moment == "begin" else [0]


WAYS = ("replay", "update", "half")
PLANS = [
    Plan(victims, moment, based, damage, way)
    for way in WAYS
    for victims, damage in [
        ("trainers", "none"),
        ("one trainer", "none"),
        ("writers", "none"),
        ("one writer", "none"),
        ("everything", "none"),
        ("everything", "cut"),
        ("everything", "zeros"),
    ]
    for moment, based in [("steps", False), ("begin", True), ("steps", True), ("close", False)]
]


# The run


def train(rank: int, work: Path, way: str, plan: Plan | None, progress: Progress) -> None:
    """One rank; without a plan it is not recorded, and writes its hashes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{work}/meet", rank=rank, world_size=2)
    net, stepping = trainer(way)
    model = nn.parallel.DistributedDataParallel(net)
    torch.manual_seed(10 + rank)
    hashes = []
    begins = [] if plan is None else plan.segments
    recorder: Recorder | None = None
    for step in range(STEPS if plan is None else plan.steps):
        if step in begins:
            if recorder is not None:
                recorder.close()
            progress.say(rank, 0, BEGINNING + step)
            recorder = Recorder(
                net, stepping, work / "run.chain", step=step, flush=3, fingerprint=7, retry=RETRY, slots=2
            )
        if recorder is not None:
            progress.say(rank, 2, recorder.writer_pid or 0)
            progress.say(rank, 0, STEPPING + begins[-1] * (step >= begins[-1]))
        stepping.param_groups[0]["lr"] = 1e-2 / (1 + step % 9)
        stepping.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(6, 24)), torch.randint(5, (6,))).backward()
        stepping.step()
        progress.say(rank, 1, step + 1)
        if recorder is not None:
            recorder.note(seen=(step + 1) * 6)
        else:
            hashes.append([hash_of(_arrays(net, stepping)), hash_of([("rng", torch.get_rng_state().numpy())])])
    if recorder is not None:
        progress.say(rank, 0, CLOSING)
        recorder.close()
    progress.say(rank, 0, CLOSED)
    if plan is None:
        (work / f"hashes-{rank}.json").write_text(json.dumps(hashes))


def _arrays(net: Net, stepping: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, tensor in net.state_dict().items():
        yield name, _bytes(tensor)
    for name, parameter in net.named_parameters():
        for state, tensor in stepping.state[parameter].items():
            if state != "step":
                yield f"{name}.{state}", _bytes(tensor)
        yield f"{name}.step", np.float64(stepping.state[parameter]["step"].item())
    yield "lr", np.float64(stepping.param_groups[0]["lr"])


def _bytes(tensor: torch.Tensor) -> Any:
    """As an array of any type, also if NumPy lacks the tensor's."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def hash_of(arrays: Any) -> str:
    """Of named arrays, whatever their order."""
    digest = xxhash.xxh3_64()
    for name, array in sorted(arrays, key=lambda one: one[0]):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def forked(work: Callable[[], None], output: Path) -> int:
    """The process id of a fork that does some work."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        warnings.simplefilter("always")
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def waited(pids: list[int]) -> list[int]:
    """The exit codes of processes; one that does not end is killed, and has the code of that."""
    codes, deadline = dict[int, int](), time.monotonic() + SECONDS
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


# The campaign


class Campaign:
    """Rounds of one seed, in a folder of their own."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._dice = root, random.Random(seed)
        self._truth = {way: self._train_unrecorded(way) for way in WAYS}

    def _train_unrecorded(self, way: str) -> list[list[str]]:
        """The hashes of each step: of its state, and of the random states of both ranks. Also make a base of step 0."""
        truth = self._root / f"{way}-truth"
        truth.mkdir()
        output, progress = truth / "said", Progress()
        ranks = [forked(lambda r=rank: train(r, truth, way, None, progress), output) for rank in range(2)]
        assert waited(ranks) == [0, 0], output.read_text()
        first, second = (json.loads((truth / f"hashes-{rank}.json").read_text()) for rank in range(2))
        assert waited([forked(lambda: self._make_base(way), output)]) == [0], output.read_text()
        return [[mine[0], mine[1], other[1]] for mine, other in zip(first, second, strict=True)]

    def _make_base(self, way: str) -> None:
        net, stepping = trainer(way)
        path = self._root / f"{way}.pt"
        torch.save({"model": net.state_dict(), "optimizer": stepping.state_dict(), "step": 0}, path)
        done = ckpt("append", self._root / f"{way}.chain", path)
        assert done.code == 0, done.err

    def round(self, plan: Plan) -> dict[str, int]:
        """Run, kill, restore. Raises AssertionError if anything is not as it must be."""
        work = Path(tempfile.mkdtemp(dir=self._root))
        run = work / "run.chain"
        if plan.based:
            shutil.copytree(self._root / f"{plan.way}.chain", run)
        progress, rng = Progress(), self._dice
        ranks = [forked(lambda r=rank: train(r, work, plan.way, plan, progress), work / "said") for rank in range(2)]
        try:
            row = self._kill(plan, run, ranks, progress, rng)
        except BaseException as error:
            output = (work / "said").read_text()[-6000:] if (work / "said").exists() else ""
            raise AssertionError(f"{plan}: {error!r} in {work}\n{output}") from error
        shutil.rmtree(work)
        gc.collect()
        return row

    def _kill(self, plan: Plan, run: Path, ranks: list[int], progress: Progress, rng: random.Random) -> dict[str, int]:
        self._await_moment(plan, progress, ranks, rng)
        written = last_of(run)
        writers = progress.writers() if plan.moment != "begin" else children(ranks)
        victims = {
            "trainers": ranks,
            "one trainer": [rng.choice(ranks)],
            "writers": writers,
            "one writer": writers and [rng.choice(writers)],
            "everything": [*ranks, *writers],
        }[plan.victims]
        victims = rng.sample(victims, len(victims))
        for pid in victims:
            if pid in ranks or _lives(pid):
                os.kill(pid, signal.SIGKILL)
        is_early = max(progress.done()) < 2 * RETRY - 2  # so that the recorder starts again at least once
        codes = waited(ranks)
        done = progress.done()
        await_ended([*writers, *progress.writers()], run)
        last = last_of(run)
        if plan.damage != "none" and last is not None:
            last = self._damage(plan, run, rng)
        elif plan.victims in ("trainers", "one trainer"):
            assert last is not None or progress.phase() <= BEGINNING, "nothing is left"
            if last is not None:
                assert min(done) <= last <= min(done) + 1, f"{last} is restorable; done were {done}"
        else:
            assert (last or 0) >= (written or 0), f"{last} is restorable; {written} was before the kill"
            if plan.victims.endswith(("writer", "writers")) and plan.moment == "steps":
                assert codes == [0, 0], f"training ended with {codes}"
                assert last == STEPS or not is_early, f"{last} is the last step, after a new segment had begun"
        if plan.moment == "begin":
            assert last is not None, "the chain is gone"
            assert last >= FIRST or plan.damage != "none", "the first segment is gone"
        checked = self._compare(run, last, plan, rng)
        return {"kills": 1, "a step ahead": last is not None and last > min(done), "restored, same bits": checked}

    def _await_moment(self, plan: Plan, progress: Progress, ranks: list[int], rng: random.Random) -> None:
        phase, step, delay = {
            "steps": (STEPPING, rng.randrange(1, 60), rng.random() * 0.02),
            "begin": (BEGINNING + plan.segments[-1], 0, rng.random() * 0.5),
            "close": (CLOSING, 0, rng.random() ** 2 * 0.3),
        }[plan.moment]
        deadline = time.monotonic() + SECONDS
        while progress.phase() < phase or min(progress.done()) < step:
            assert time.monotonic() < deadline, "the run hangs"
            assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "the run ended too early"
            time.sleep(0.001)
        time.sleep(delay)

    def _damage(self, plan: Plan, run: Path, rng: random.Random) -> int:
        """Cut each file of the last segment in its last part, or put zeros there; the step that must be left."""
        chain = chain_file.load(run / chain_file.NAME)
        segment = states.open_steps(run, chain.segments[-1])
        left = []
        for rank, log in enumerate(segment.logs):
            path = segment.folder / rank_file(rank)
            content = path.read_bytes()
            at = len(content) - rng.randrange(min(len(content), rng.choice((200, 20_000, 200_000))))
            zeros = rng.choice((8, 5000, 100_000)) if plan.damage == "zeros" else 0
            damaged = content[:at] + bytes(zeros)
            path.write_bytes(damaged)
            ends = [record.begin - HEAD.size for record in log.records[1:]] + [log.end]
            whole = sum(damaged[:end] == content[:end] and len(damaged) >= end for end in ends)
            kept = log.records[:whole]
            left.append(Segment(segment.folder, segment.layout, (_only(log, kept),)).first + _steps(kept))
        after = states.open_steps(run, chain.segments[-1])
        assert after.last == min(left), f"{after.last} is the last step, {left} were left"
        return after.last

    def _compare(self, run: Path, last: int | None, plan: Plan, rng: random.Random) -> int:
        """Restore the last step and one before it; how many were compared."""
        checked = 0
        if last is None:
            return 0
        for step in dict.fromkeys((last, rng.randint(0, last))):
            chain = chain_file.load(run / chain_file.NAME)
            try:
                checkpoint = states.open_state(run, chain, step)
            except NotFoundError:  # between two segments, where no writer was there
                assert step != last
                assert plan.victims.endswith(("writer", "writers"))
                continue
            except CkptError:
                # A segment whose beginning was damaged is of no use, and says so.
                if plan.damage == "none" or step != chain.segments[-1].first:
                    raise
                continue
            if step == 0:
                continue
            wanted = self._truth[plan.way][step - 1]
            hashes = [hash_of(_restored(checkpoint))]
            assert hashes[0] == wanted[0], f"step {step} is not what the run had"
            random_states = checkpoint.extras.get("random_states")
            if random_states is not None and step > FIRST:
                assert isinstance(random_states, dict)
                for rank in range(2):
                    state = random_states[f"rank-{rank:05d}"]
                    assert hash_of([("rng", state["torch"])]) == wanted[1 + rank], f"random states of step {step}"
            checked += 1
        return checked


def _only(log: Any, records: tuple[Any, ...]) -> Any:
    return type(log)(log.path, records, 0, 0, None)


def _steps(records: tuple[Any, ...]) -> int:
    parts = (record.meta.get("part", [0, 1]) for record in records if record.kind == 1)
    return sum(number == count - 1 for number, count in parts)


def _restored(checkpoint: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in checkpoint.parameters.items():
        if parameter.role == "extra":
            continue
        states = dict(parameter.states)
        count = states.pop("step", None)
        for state, tensor in states.items():
            yield (name if state == "model" else f"{name}.{state}"), read(tensor)
        if parameter.role == "parameter":
            yield f"{name}.step", np.float64(parameter.values["step"] if count is None else read(count).item())
    yield "lr", np.float64(checkpoint.groups[0].options["lr"])


def last_of(run: Path) -> int | None:
    """The last step that can be restored; None if there is not a chain."""
    return states.last_step(run, chain_file.load(run / chain_file.NAME)) if (run / chain_file.NAME).is_file() else None


def children(ranks: list[int]) -> list[int]:
    """The children of processes: their writers, where these are yet to be known."""
    return [int(pid) for rank in ranks for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]


def await_ended(writers: list[int], run: Path) -> None:
    """Wait until no writer is left."""
    deadline = time.monotonic() + SECONDS
    while any(map(_lives, writers)) or any(map(folder.is_growing, run.glob("gradients-*"))):
        assert time.monotonic() < deadline, "a writer does not end"
        time.sleep(0.003)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rounds(root: Path, seed: int) -> Iterator[Round]:
    campaign = Campaign(root, seed)
    order = random.Random(seed).sample(PLANS, len(PLANS))
    for plan in itertools.cycle(order):
        yield Round(f"{plan.way}, {plan.victims}, {plan.damage}, {plan.moment}", partial(campaign.round, plan))
