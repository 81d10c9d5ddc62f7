"""Change a recorded run at a random step in a random way, or flip one of its bits: nothing may stay silent.

Run as `python tests/campaigns/recording_draws.py [--outside 100] [--faults 100] [--seed 1] [--only SEED]`. Each
draw is a small run with a random model and optimizer. `outside`: the loop changes weights, states, buffers, a frozen
teacher or options between two steps. `faults`: the hardware flips a bit of a weight, a moment or a gradient, without
a version counter, between two steps, in the result of a step, or in a gradient after the recorder has copied it. Half
of the runs hash only a part of their tensors between steps, as large models do. Each step is restored and compared
with copies taken in the loop. It prints how the draws ended:

recorded   every step has the bits that the run had
named      some steps have other values or cannot be restored, and the log names the first hash after the fault
gone       a flipped bit has no effect any more where the run next hashes its states: only steps before that differ
unproved   some steps have other values, and the log says that they are not proved
WRONG      a step before the fault differs, or the log names another step
SILENT, lost, crashed as in tests/campaigns/recording_loops.py

Exits with 1 after one of the last four.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[1] / "jobs"))

import numpy as np
import torch
from torch import nn

import recording_loops
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import watch
from training_loops.run import Loop, Run, loss_of, mlp, norm_net

FINGERPRINT = 10
"""Steps between two hashes of the states in these runs."""
LONG, SHORT, PROVED_FROM = 45, 6, 16
"""Steps of a run that a prover follows, and of one without; and the step after which the prover starts."""
PROVER_SECONDS, STEP_SECONDS = 0.7, 0.02
"""How long a run waits until its prover has started, and after each later step, so that the prover keeps up."""
BAD = ("WRONG", "SILENT", "lost", "crashed")
KINDS = ("recorded", "named", "gone", "unproved", *BAD)


class Taught(nn.Module):
    """With a teacher that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.student = norm_net()
        self.teacher = deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x)


@dataclass(frozen=True)
class Trainer:
    """A model and an optimizer that are trained."""

    make: Callable[[], nn.Module]
    optimize: Callable[[Any], torch.optim.Optimizer]


OPTIM = torch.optim
TRAINERS = {
    "adamw": Trainer(norm_net, lambda p: OPTIM.AdamW(p, 1e-2, fused=True)),
    "adamw-foreach": Trainer(mlp, lambda p: OPTIM.AdamW(p, 1e-2, foreach=True)),
    "sgd-momentum": Trainer(norm_net, lambda p: OPTIM.SGD(p, 0.05, momentum=0.9)),
    "adafactor": Trainer(norm_net, lambda p: OPTIM.Adafactor(p, 1e-2)),
    "bf16-adamw": Trainer(lambda: mlp().bfloat16(), lambda p: OPTIM.AdamW(p, 1e-2, fused=True)),
    "teacher": Trainer(Taught, lambda p: OPTIM.AdamW(p, 1e-2, fused=True)),
}


@dataclass
class Target:
    """The run that is changed, and a source of chance."""

    model: Any
    optimizer: Any
    dice: random.Random
    earlier: tuple[Any, Any]
    """The state dicts of model and optimizer at step 2."""

    def weight(self) -> torch.Tensor:
        return self.dice.choice([p for group in self.optimizer.param_groups for p in group["params"]])

    def moment(self) -> torch.Tensor:
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        return self.dice.choice([one for one in states if isinstance(one, torch.Tensor) and one.dim()])

    def buffer(self) -> torch.Tensor:
        return self.dice.choice(list(self.model.buffers()) or list(self.model.parameters()))

    def frozen(self) -> torch.Tensor:
        return self.dice.choice([p for p in self.model.parameters() if not p.requires_grad] or [self.weight()])


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a tensor as NumPy has it: no change of it raises a version counter."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def flip(tensor: torch.Tensor, dice: random.Random) -> None:
    """Flip one bit."""
    content = bytes_of(tensor)
    content[dice.randrange(content.size)] ^= np.uint8(1 << dice.randrange(8))


def new_data(weight: torch.Tensor) -> None:
    weight.data = weight.data * 0.75


def with_view(target: Target) -> None:
    weight = target.weight()
    weight.data = torch.cat([weight.data.reshape(-1), torch.ones(3)]).to(weight.dtype)[:-3].view_as(weight)


def new_moment(target: Target) -> None:
    state = target.optimizer.state[target.weight()]
    name = target.dice.choice([key for key, one in state.items() if isinstance(one, torch.Tensor) and one.dim()])
    state[name] = torch.rand_like(state[name])


def reload(target: Target, both: bool = False) -> None:
    target.model.load_state_dict(target.earlier[0])
    if both:
        target.optimizer.load_state_dict(deepcopy(target.earlier[1]))


def options(target: Target, **values: Any) -> None:
    group = target.optimizer.param_groups[0]
    group.update({key: value for key, value in values.items() if key in group})


def other_way(target: Target) -> None:
    """The kernels of the step are others."""
    group = target.optimizer.param_groups[0]
    fused = bool(group.get("fused"))
    options(target, fused=None if fused else True, foreach=fused or None)


def new_buffer(target: Target) -> None:
    module, name = target.dice.choice(
        [(m, name) for m in target.model.modules() for name, _ in m.named_buffers(recurse=False)] or [(None, "")]
    )
    if module is not None:
        setattr(module, name, getattr(module, name) + 1)


OUTSIDE: dict[str, Callable[[Target], Any]] = {
    "weight-clamped": lambda t: t.weight().clamp_(-0.1, 0.1),
    "data-clamped": lambda t: t.weight().data.clamp_(-0.1, 0.1),
    "all-clamped": lambda t: [p.clamp_(-0.05, 0.05) for p in t.model.parameters()],
    "data-assigned": lambda t: new_data(t.weight()),
    "data-a-view": with_view,
    "weight-copied": lambda t: t.weight().copy_(torch.randn(())),
    "one-element": lambda t: t.weight().view(-1)[:1].mul_(1.5),
    "by-numpy": lambda t: flip(t.weight(), t.dice),
    "by-storage": lambda t: t.weight().untyped_storage().fill_(0),
    "model-loaded": reload,
    "both-loaded": lambda t: reload(t, both=True),
    "optimizer-loaded": lambda t: t.optimizer.load_state_dict(deepcopy(t.earlier[1])),
    "moment-zeroed": lambda t: t.moment().zero_(),
    "moment-by-numpy": lambda t: bytes_of(t.moment()).fill(0),
    "moment-new": new_moment,
    "states-cleared": lambda t: t.optimizer.state.clear(),
    "states-new": lambda t: setattr(t.optimizer, "state", defaultdict(dict)),
    "state-of-one-removed": lambda t: t.optimizer.state.pop(t.weight(), None),
    "buffer-set": lambda t: t.buffer().zero_(),
    "buffer-by-numpy": lambda t: bytes_of(t.buffer()).fill(0),
    "buffer-new": new_buffer,
    "teacher-moved": lambda t: t.frozen().mul_(0.5),
    "teacher-by-numpy": lambda t: bytes_of(t.frozen()).fill(0),
    "teacher-data": lambda t: new_data(t.frozen()),
    "rate": lambda t: options(t, lr=3e-3),
    "momentum-and-decay": lambda t: options(t, momentum=0.5, betas=(0.5, 0.9), weight_decay=0.2),
    "maximize": lambda t: options(t, maximize=True),
    "other-kernels": other_way,
    "no-gradient-any-more": lambda t: t.weight().requires_grad_(False),
}
SET_FOR_THE_NEXT_STEP = ("rate", "momentum-and-decay", "maximize", "other-kernels")
"""Options that are set after a note belong to the next step."""
PLACES = ("after the step", "after the note", "before the forward pass", "before the step")
FAULTS = ("weight", "moment", "gradient", "result weight", "result moment")


@dataclass(frozen=True)
class Draw:
    """A run, and what happens to it."""

    kind: Literal["outside", "faults"]
    seed: int
    steps: int
    trainer: str
    way: str
    place: str
    at: int
    """The number of the step after which it happens, or in which a result or a gradient is wrong."""
    is_sampled: bool
    """Are only parts of the tensors hashed between steps?"""

    def __str__(self) -> str:
        parts = "parts hashed" if self.is_sampled else "all hashed"
        return f"{self.kind} {self.seed}: {self.trainer}, {self.way} {self.place} {self.at} of {self.steps}, {parts}"


def draw(kind: Literal["outside", "faults"], seed: int, steps: int = LONG) -> Draw:
    dice = random.Random(f"{kind} {seed}")
    trainer = dice.choice(list(TRAINERS))
    way = dice.choice(list(OUTSIDE) if kind == "outside" else FAULTS)
    place = "in step" if way.startswith(("gradient", "result")) else dice.choice(PLACES)
    return Draw(kind, seed, steps, trainer, way, place, dice.randrange(3, steps), dice.random() < 0.5)


def body(one: Draw, run: Run) -> None:
    dice = random.Random(one.seed)
    trainer = TRAINERS[one.trainer]
    model = trainer.make()
    optimizer = trainer.optimize([p for p in model.parameters() if p.requires_grad])
    run.checks_random = False
    run.resumes = one.way not in ("no-gradient-any-more", "states-new")
    run.sets_rates_first = True
    target = Target(model, optimizer, dice, ({}, {}))

    def happen(place: str, step: int) -> None:
        if (one.place, one.at) != (place, step):
            return
        if one.kind == "faults":
            flip(target.weight() if one.way == "weight" else target.moment(), dice)
        else:
            if one.way in SET_FOR_THE_NEXT_STEP:
                run.also()
            with torch.no_grad():
                OUTSIDE[one.way](target)

    number = 0

    def result(*_: Any) -> None:
        if number + 1 == one.at and one.way.startswith("result"):
            flip(target.moment() if one.way.endswith("moment") else target.weight(), dice)

    optimizer.register_step_post_hook(result)  # before the recorder's, so the step itself seems to give this
    options = {"fingerprint": FINGERPRINT, "retry": 0}
    with run.record(model, optimizer, **options):
        begin_group = optimizer._init_group

        def with_fault(group: Any, *arguments: Any) -> Any:
            if number + 1 == one.at and one.way == "gradient":
                flip(dice.choice([p.grad for p in group["params"] if p.grad is not None]), dice)
            return begin_group(group, *arguments)

        optimizer._init_group = with_fault  # inside of `step`, after all hooks
        for number in range(one.steps):
            happen("before the forward pass", number)
            if number == one.at and one.place == "before the forward pass":
                run.after()  # the state of the last step has it, too
            optimizer.zero_grad()
            loss_of(model, number, next(model.parameters())).backward()
            happen("before the step", number)
            optimizer.step()
            if one.trainer == "teacher" and number % 3 == 0:
                with torch.no_grad():
                    for teacher, student in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                        teacher.lerp_(student, 0.1)
            happen("after the step", number + 1)
            if number == 1:
                target.earlier = deepcopy((model.state_dict(), optimizer.state_dict()))
            run.note(seen=number)
            happen("after the note", number + 1)
            run.after()
            if number >= PROVED_FROM:
                time.sleep(PROVER_SECONDS if number == PROVED_FROM else STEP_SECONDS)


@contextmanager
def parts_hashed(is_sampled: bool) -> Iterator[None]:
    """Hash between steps as of a large model."""
    before = watch.SMALL_NBYTES
    watch.SMALL_NBYTES = 0 if is_sampled else before
    try:
        yield
    finally:
        watch.SMALL_NBYTES = before


def outcome_of(one: Draw, folder: Path, restores: int = 1) -> tuple[str, str]:
    """How a draw ended, and why. `restores`: the number of steps that are also loaded with `resume`."""
    runs: list[Run] = []

    def keep_run(run: Run) -> None:
        runs.append(run)
        body(one, run)

    with parts_hashed(one.is_sampled), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = recording_loops.outcome_of(Loop(str(one), one.kind, keep_run), folder, restores)
    is_gone = outcome.kind == "SILENT" and one.kind == "faults" and _is_gone(one, runs[0])
    shutil.rmtree(folder, ignore_errors=True)
    if is_gone:
        return "gone", outcome.detail
    if outcome.kind == "exact":
        return "recorded", outcome.detail
    named = re.search(r"step (\d+)\b.*? differs from the run|differs from the run: .*?step (\d+)", outcome.detail)
    if outcome.kind not in ("said", "lost") or (outcome.kind == "lost" and named is None):
        return outcome.kind, outcome.detail
    first = re.search(r"from (\d+):", outcome.detail)
    if first is None or int(first[1]) < one.at:
        return "WRONG", outcome.detail
    if named is None:
        return "unproved", outcome.detail
    step = int(named[1] or named[2])
    return ("named" if one.at <= step <= _next_hash(one.at) else "WRONG"), outcome.detail


def _is_gone(one: Draw, run: Run) -> bool:
    """Are all steps from the next hash on those of the run?"""
    chain = chain_file.read(run.chain)
    steps = [step for step in run.truths if step < one.at or step >= _next_hash(one.at)]
    return not any(
        any(
            recording_loops.differences(
                states.open_state(run.chain, chain, step), run.truths[step], run.truths.get(step + 1)
            )
        )
        for step in steps
    )


def _next_hash(step: int) -> int:
    """The first step from this one on after which the run hashes its states."""
    return next(n for n in range(step, 2 * step + FINGERPRINT) if n % FINGERPRINT == 0 or not n & (n - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outside", type=int, default=100, metavar="N", help="outside changes")
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="flipped bits")
    parser.add_argument("--seed", type=int, default=1, help="the number of the first draw")
    parser.add_argument("--bad", action="store_true", help="print only draws that are WRONG, SILENT, lost or crashed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="draws-"))
    counts: dict[str, Counter[str]] = {}
    begin = time.monotonic()
    for kind, number in (("outside", arguments.outside), ("faults", arguments.faults)):
        of_kind = counts[kind] = Counter[str]()
        for seed in range(arguments.seed, arguments.seed + number):
            one = draw(kind, seed)  # type: ignore[arg-type]
            outcome, detail = outcome_of(one, folder / "draw")
            of_kind[outcome] += 1
            if not arguments.bad or outcome in BAD:
                print(f"{outcome:9} {one}  {' '.join(detail.split()):.220}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    for kind, of_kind in counts.items():
        print(f"{kind}: {of_kind.total()} draws, " + ", ".join(f"{of_kind[one]} {one}" for one in KINDS))
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if any(of_kind[one] for of_kind in counts.values() for one in BAD) else 0


if __name__ == "__main__":
    sys.exit(main())
