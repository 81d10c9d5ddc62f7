"""Record training loops as people write them, restore each of their steps, and compare: none may be silently wrong.

Run as `python tests/campaigns/recording_loops.py [-k TEXT] [--json FILE] [--slow]`. It prints how each loop ended:

exact    every value of every step has the bits that the run had
refused  the recorder refused the run at its start, in one sentence
said     a step is missing or marked as not exact, and a `RecorderWarning`, or a notice of the step, says so
lost     steps are missing, or cannot be resumed from, and the run did not say so
SILENT   a restored step has other values, and nothing says so
crashed  an exception, or the process ended

Packages of `pip install --target FOLDER` are found with CKPT_LOOPS_PACKAGES=FOLDER. Exits with 1 after `lost`,
`SILENT` or `crashed`.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("support", "jobs"))

import numpy as np

EXTRA_PACKAGES = os.environ.get("CKPT_LOOPS_PACKAGES")
if EXTRA_PACKAGES:
    sys.path.append(EXTRA_PACKAGES)
TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import torch  # noqa: E402

from ckpt_formats.core.checkpoint import Checkpoint  # noqa: E402
from ckpt_formats.core.dtypes import DTYPES  # noqa: E402
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, UnsupportedError  # noqa: E402
from ckpt_formats.core.tensor import read  # noqa: E402
from ckpt_formats.core.values import Global, TensorName  # noqa: E402
from ckpt_formats.universal.chain import chain_file, states  # noqa: E402
from ckpt_training import load  # noqa: E402
from training_loops import (  # noqa: E402
    buffers,
    corners,
    forms,
    gradients,
    optimizers,
    outside,
    own_optimizers,
    packages,
    passes,
    processes,
    teachers,
)
from training_loops.run import LOOPS, Loop, Run, SkipLoop, Truth, flat, random_leaves, truth_of  # noqa: E402

MODULES = (
    outside,
    teachers,
    buffers,
    forms,
    gradients,
    processes,
    corners,
    optimizers,
    own_optimizers,
    packages,
    passes,
)
"""Importing them registers their loops."""
BAD = ("lost", "SILENT", "crashed")
KINDS = ("exact", "refused", "said", *BAD, "skipped")
MARKS = ("approximate", "not proved", "differs from the run")
"""Words of the notices of steps that may have other values than the run."""
SECONDS = 300
"""After this time a loop counts as crashed."""


@dataclass(frozen=True)
class Outcome:
    """How a loop ended."""

    kind: str
    detail: str = ""
    seconds: float = 0.0


class Differs(Exception):
    """A restored step differs from the run."""


def outcome_of(loop: Loop, folder: Path, restores: int = 2) -> Outcome:
    """Run a loop in this process and compare all its steps; `restores` of them also as files that `load` loads."""
    missing = [name for name in loop.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome("skipped", f"needs {missing[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder.absolute() / "run.chain")
    begin = time.monotonic()
    try:
        with run.listening():
            loop.body(run)
    except CkptError as error:
        if run.recorder is None:
            sentence = str(error)
            is_refusal = isinstance(error, (UnsupportedError, InvalidArgumentError)) and "\n" not in sentence
            return Outcome("refused" if is_refusal else "crashed", sentence, time.monotonic() - begin)
        return Outcome("crashed", f"training was stopped by {type(error).__name__}: {error}")
    except SkipLoop as error:
        return Outcome("skipped", str(error))
    except Exception as error:
        return Outcome("crashed", _last_frames(error))
    finally:
        if run.recorder is not None:
            with contextlib.suppress(Exception):
                run.recorder.close()
    try:
        kind, detail = _compare_all(run, restores)
    except Exception as error:
        return Outcome("crashed", f"comparing: {_last_frames(error)}")
    return Outcome(kind, detail, round(time.monotonic() - begin, 2))


def _last_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({where})"


def _compare_all(run: Run, restores: int) -> tuple[str, str]:
    """The kind of the outcome, and its reason."""
    chain = run.chain
    if not (chain / chain_file.NAME).exists():
        return ("said" if run.warnings else "lost"), "; ".join(run.warnings) or "there is no chain"
    steps = sorted(run.truths)
    lost, marked, resumed = [], [], []
    for step in steps:
        try:
            state = states.open_state(chain, chain_file.read(chain), step)
            later = run.truths.get(step + 1) if run.sets_rates_first else None
            differing = list(differences(state, run.truths[step], later))
            if differing and step in run.others:
                differing = list(differences(state, run.others[step], later))
        except CkptError as error:
            lost.append((step, str(error)))
            continue
        mark = next((str(one) for one in state.notices if any(word in one for word in MARKS)), None)
        if differing and mark is not None:
            marked.append((step, mark))
        elif differing:
            return "SILENT", f"step {step} of {steps[-1]}: {differing[0]}" + (
                f" and {len(differing) - 1} more" if differing[1:] else ""
            )
        else:
            resumed.append(step)
    problems = []
    for step in _some(resumed, restores) if run.resumes else ():
        kind, detail = _resume(run, step, run.truths[step])
        if kind == "SILENT" and step in run.others:
            kind, detail = _resume(run, step, run.others[step])
        if kind == "SILENT":
            return kind, detail
        if kind != "exact":
            problems.append(detail)
    words = "; ".join(run.warnings)
    if run.expects_warning and not words:
        return "lost", "steps that the recorder cannot see are missing, and no warning says so"
    if lost:
        detail = f"{len(lost)} of {len(steps)} steps, from {lost[0][0]}: {lost[0][1]}"
        return ("said", f"{words} ({detail})") if words else ("lost", detail)
    if problems:
        return "lost", problems[0]
    if marked:
        return "said", f"{len(marked)} of {len(steps)} steps, from {marked[0][0]}: {marked[0][1]}"
    return "exact", words


def _some(steps: list[int], number: int) -> list[int]:
    """The last, and others in equal distances."""
    return sorted({steps[-1 - len(steps) * i // number] for i in range(min(number, len(steps)))}) if steps else []


def differences(state: Checkpoint, truth: Truth, next_truth: Truth | None = None) -> Iterator[str]:
    """Where an opened step differs. States that are no tensors of a parameter are compared after `load`."""
    for path, leaf in truth.model.items():
        name = _clean(path)
        parameter = state.parameters.get(state.aliases.get(name, name))
        if parameter is None:
            if isinstance(leaf, torch.Tensor) and path in truth.names:
                yield f"`{name}` is missing"
        elif isinstance(leaf, torch.Tensor) and not _same(read(parameter.weight), leaf):
            yield f"`{name}`: {_figures(read(parameter.weight), leaf)}"
    for path, leaf in truth.optimizer.items():
        owner, _, key = path.partition("|")
        name = _clean(owner.partition(":")[2])
        parameter = state.parameters.get(state.aliases.get(name, name))
        if parameter is not None and key in parameter.states:
            values: Any = read(parameter.states[key])
        elif parameter is not None and key in parameter.values:
            values = parameter.values[key]
        else:
            continue
        if not _same(values, leaf) and ":" in path:
            yield f"`{path}`: {_figures(values, leaf)}"
    if len(state.groups) != len(truth.options):
        yield f"{len(state.groups)} groups, not {len(truth.options)}"
    for number, (group, options) in enumerate(zip(state.groups, truth.options, strict=False)):
        mine = {
            key: read(state.parameters[value.name].weight) if isinstance(value, TensorName) else value
            for key, value in flat(dict(group.options)).items()
        }
        later = next_truth.options[number] if next_truth and number < len(next_truth.options) else options
        for key, value in options.items():
            if not (_same(mine.get(key), value) or _same(mine.get(key), later.get(key))):
                yield f"group {number}: `{key}` is {mine.get(key)!r:.60}, not {value!r:.60}"


def _resume(run: Run, step: int, truth: Truth) -> tuple[str, str]:
    """Load a step into the run's own objects, and compare these."""
    optimizer = run.optimizers if len(run.optimizers) > 1 else run.optimizers[0]
    try:
        resumed = load(f"{run.chain}@{step}", run.model, optimizer)
    except Exception as error:
        return "lost", f"load() at step {step}: {_last_frames(error)}"
    mine = truth_of(run.model, run.optimizers, random_leaves(), flat(dict(resumed.extras)))
    if resumed.step != step:
        return "SILENT", f"load() at step {step} is at {resumed.step}"
    later = run.truths.get(step + 1, truth) if run.sets_rates_first else truth
    pairs = [("", mine.model, truth.model, truth.model), ("", mine.optimizer, truth.optimizer, truth.optimizer)]
    pairs += [
        (f"group {i}: ", a, b, later.options[i] if i < len(later.options) else b)
        for i, (a, b) in enumerate(zip(mine.options, truth.options, strict=False))
    ]
    if run.checks_random:
        pairs.append(("random states: ", mine.random, truth.random, truth.random))
    pairs.append(("notes: ", {k: v for k, v in mine.notes.items() if k in truth.notes}, truth.notes, truth.notes))
    begun = {path.partition("|")[0] for path in truth.optimizer}
    for label, actual, wanted, other in pairs:
        for key in sorted(actual.keys() | wanted.keys()):
            a, b = actual.get(key), wanted.get(key)
            if _same(a, b) or (key in actual and _same(a, other.get(key))):
                continue
            if isinstance(b, str) and str(a).startswith("<generator object Optimizer.load_state_dict"):
                continue  # torch itself cannot load a text as a state
            if label == "" and "|" in key and _is_cast(a, b):
                continue
            if label.startswith("group") and (key not in wanted or key in _OF_THE_RUN):
                continue  # an optimizer has default options, and its own choice of kernels
            if label.startswith("group") and isinstance(a, torch.Tensor) and _same(a, torch.tensor(b).to(a.dtype)):
                continue  # a rate that is a tensor in the run, and was none
            if label == "" and key not in wanted and key.partition("|")[0] not in begun and not _any(a):
                continue  # it is what an optimizer begins with
            return "SILENT", f"load() at step {step}: {label}`{key}` {_figures(a, b)}"
    return "exact", ""


_OF_THE_RUN = ("foreach", "fused", "capturable", "differentiable")


def _is_cast(actual: Any, wanted: Any) -> bool:
    """Has torch's `load_state_dict` given a state the dtype of its parameter?"""
    if not (isinstance(actual, torch.Tensor) and isinstance(wanted, torch.Tensor)) or actual.dtype == wanted.dtype:
        return False
    return actual.is_floating_point() and _same(actual, wanted.to(actual.dtype))


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _any(value: Any) -> bool:
    return bool(np.any(_array(value))) if isinstance(value, (torch.Tensor, np.ndarray)) else bool(value)


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.resolve_conj().resolve_neg()
        name = str(value.dtype).removeprefix("torch.")
        if name in DTYPES:
            return value.reshape(-1).contiguous().view(torch.uint8).numpy().view(DTYPES[name]).reshape(value.shape)
        return value.reshape(-1).contiguous().view(torch.uint8).numpy()
    return np.asarray(value)


def _same(actual: Any, wanted: Any) -> bool:
    """The same bits, but NaNs are alike; a number may have another type."""
    if isinstance(actual, Global):  # in a checkpoint that is not loaded by torch
        actual = getattr(torch, actual.name, actual)
    if isinstance(wanted, (str, bytes, type(None), bool)) or isinstance(actual, (str, bytes, type(None))):
        return type(actual) is type(wanted) and actual == wanted
    try:
        a, b = _array(actual), _array(wanted)
        if a.dtype == object or b.dtype == object:
            return bool(actual == wanted)
    except (TypeError, ValueError):
        return bool(actual == wanted)
    if a.size == b.size == 1 and (a.shape == () or b.shape == ()):
        x, y = a.reshape(()).item(), b.reshape(()).item()
        return x == y or (x != x and y != y)
    if a.shape != b.shape or (a.dtype != b.dtype and isinstance(wanted, (torch.Tensor, np.ndarray))):
        return False
    if a.tobytes() == b.tobytes():
        return True
    with np.errstate(invalid="ignore"):
        alike = (a == b) | ((a != a) & (b != b))
    if not alike.all():
        return False
    return a.dtype.kind not in "fcV" or bool((np.signbit(a.real) == np.signbit(b.real))[a == a].all())


def _figures(actual: Any, wanted: Any) -> str:
    a, b = (_array(one) if isinstance(one, (torch.Tensor, np.ndarray)) else one for one in (actual, wanted))
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape and a.dtype == b.dtype):
        return f"is {_brief(a)}, not {_brief(b)}"
    with np.errstate(all="ignore"):
        differing = int((~((a == b) | ((a != a) & (b != b)))).sum())
        wide = complex if a.dtype.kind == "c" else float
        largest = float(np.nanmax(np.abs(a.astype(wide) - b.astype(wide)))) if a.size else 0.0
    return f"{differing} of {a.size} values differ, by up to {largest:.2g}"


def _brief(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) and value.ndim else f"{value!r:.50}"


def run_apart(loop: Loop, folder: Path) -> Outcome:
    """Run a loop in a process of its own, which it may leave in any state."""
    mine, its = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        sink = os.open(folder.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            its.send(outcome_of(loop, folder))
        except BaseException as error:
            its.send(Outcome("crashed", _last_frames(error)))
        os._exit(0)
    its.close()
    try:
        outcome: Outcome = mine.recv() if mine.poll(SECONDS) else Outcome("crashed", f"no end after {SECONDS} s")
    except EOFError:
        outcome = Outcome("crashed", "the process ended")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="TEXT", action="append", help="only loops whose name or topic contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes as JSON")
    parser.add_argument(
        "--slow", action="store_true", help="also loops that take several seconds, such as compiled ones"
    )
    parser.add_argument("--bad", action="store_true", help="print only loops that are lost, SILENT or crashed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # no pool of threads, which a fork would break
    outcomes: dict[str, Outcome] = {}
    folder = Path(tempfile.mkdtemp(prefix="loops-"))
    outcome_of(LOOPS["betas-changed"], folder / "warm")  # imports what all others would import again
    for loop in LOOPS.values():
        if options.k and not any(text in loop.name or text == loop.topic for text in options.k):
            continue
        if loop.slow and not options.slow:
            outcome = Outcome("skipped", "slow: needs --slow")
        else:
            outcome = run_apart(loop, folder / loop.name)
            shutil.rmtree(folder / loop.name, ignore_errors=True)
        outcomes[loop.name] = outcome
        if not options.bad or outcome.kind in BAD:
            detail = " ".join(outcome.detail.split())
            print(
                f"{loop.topic:14} {loop.name:42} {outcome.kind:8} {outcome.seconds:5.1f} s  {detail:.220}", flush=True
            )
    counts = Counter(one.kind for one in outcomes.values())
    print(f"{len(outcomes)} loops: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    if options.json:
        options.json.write_text(json.dumps({name: asdict(one) for name, one in outcomes.items()}, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(one.kind in BAD for one in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
