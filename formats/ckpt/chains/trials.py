"""Search the largest step size of the quantizer whose state the user's evaluation accepts."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckpt.job import Job
from ckpt.pipeline import Execution
from ckpt.pipeline.folder_target import locked_folder
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.arguments import Admits, Checked, Increase
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.text import printable
from ckpt_formats.universal import Universal, manifest

if TYPE_CHECKING:
    from ckpt_codecs.lossy import Subspace

PLACEHOLDER = "{}"
"""In the command, the path of a state replaces it."""
_MAX_LINE = 1 << 16
"""Bytes of a line that is read as one."""
_TRIAL = ".ckpt-trial"
"""The ending of the folder where states are evaluated. Its content is complete, unlike that of a staging folder."""


@dataclass(frozen=True)
class Trial:
    """One state that was evaluated."""

    step_size: float | None
    """The quantizer's step size; None for the exact state."""
    loss: float
    increase: float
    """Over the loss of the exact state."""


def _ignore(trial: Trial) -> None:
    pass


@dataclass(frozen=True)
class Evaluation(Checked):
    """The user's own measure of a state: a command whose last line of output is a loss."""

    command: Annotated[tuple[str, ...], Admits("the words of a command", len)]
    max_increase: Increase
    """By how much the loss may increase."""
    on_trial: Callable[[Trial], None] = field(default=_ignore, compare=False)
    """Called after each trial."""


@dataclass(frozen=True)
class AcceptedStep:
    """The step size of the quantizer, and the losses of its state and of the exact one."""

    step_size: float
    loss: float
    exact: float


def search_step(
    codec: "Subspace",
    evaluation: Evaluation,
    target: Path,
    source: Checkpoint,
    write: Callable[[DeltaCodec, Path], object],
    resources: Execution,
) -> "tuple[Subspace, AcceptedStep]":
    """The codec at the coarsest step size that is accepted. `write` writes the source, with a codec, as a folder.

    States are put next to the target, one after the other, each in a folder that is removed. Raises `UnsupportedError`
    if no step size is accepted, or if the command fails.
    """
    from ckpt_codecs.lossy import coarsest  # only an evaluation needs it

    losses = dict[float, float]()
    with _trial_folder(target, resources.locks) as folder:
        exact = _evaluate(source, Universal(), evaluation, folder, resources)
        if not isfinite(exact):
            raise _refused(evaluation, f"states that the loss of the exact state is {exact}")
        evaluation.on_trial(Trial(None, exact, 0.0))

        def increase(step: float) -> float:
            write(codec.at(step), folder / "coded")
            content = manifest.load(folder / "coded" / manifest.NAME).content
            coded = Universal().read(folder / "coded", ReadOptions())
            losses[step] = _evaluate(coded, Universal(content=content), evaluation, folder, resources)
            shutil.rmtree(folder / "coded")
            evaluation.on_trial(Trial(step, losses[step], losses[step] - exact))
            return inf if isnan(losses[step]) else losses[step] - exact

        step = coarsest(increase, evaluation.max_increase)
    if step is None:
        finest = min(losses)
        raise UnsupportedError(
            f"even the smallest step size, {finest:g}, increases the loss from {exact:.6g} to {losses[finest]:.6g}, "
            f"by more than {evaluation.max_increase:g}",
            hint="Allow more: `max_increase` (--max-loss-increase); or give no evaluation, and nothing is lost.",
        )
    return codec.at(step), AcceptedStep(step, losses[step], exact)


@contextmanager
def _trial_folder(target: Path, locks: bool) -> Iterator[Path]:
    """A folder for trials, which is removed afterwards. What a killed run left in it is removed first.

    Raises `LockedError` if another process tries something for the same target.
    """
    folder = target.parent / f".{target.name}{_TRIAL}"
    with locked_folder(folder, target, locks):
        try:
            for entry in folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _evaluate(
    state: Checkpoint, format: Universal, evaluation: Evaluation, folder: Path, resources: Execution
) -> float:
    """The loss of a state by the command; the state is written for it, and removed."""
    target = folder / "state"
    Job(state, target, format).run(resources=resources)
    loss = _run(evaluation, target)
    shutil.rmtree(target)
    return loss


def _run(evaluation: Evaluation, state: Path) -> float:
    """The number in the last line that the command prints. It runs without a shell, and shares our stderr."""
    command = [word.replace(PLACEHOLDER, str(state)) for word in evaluation.command]
    last = ""
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                while line := process.stdout.readline(_MAX_LINE):
                    last = line.decode("utf-8", "replace").strip() or last
            except KeyboardInterrupt:
                process.terminate()  # the signal may not have reached the command
                raise
    except OSError as error:
        raise _refused(evaluation, f"cannot be run: {error.strerror or error}") from None
    if process.returncode:
        raise _refused(evaluation, f"ended with {process.returncode}")
    try:
        return float(last)
    except ValueError:
        raise _refused(evaluation, f"ended with the line {last[:80]!r}, which is not a number") from None


def _refused(evaluation: Evaluation, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"the evaluation command {printable(evaluation.command[0])} {problem}",
        hint=f"In the command (--eval-cmd), the path of a universal checkpoint replaces {PLACEHOLDER}. "
        "Its last line is the loss, a number.",
    )
