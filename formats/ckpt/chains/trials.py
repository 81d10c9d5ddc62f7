"""`--max-loss-increase`: the coarsest quantiser whose state the user's own evaluation still accepts."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite, isnan
from pathlib import Path

from ckpt.pipeline import Resources
from ckpt.staging import locked_folder
from ckpt_cli import work
from ckpt_cli.views import report
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.lossy import Subspace, coarsest
from ckpt_formats.core.checkpoint import Checkpoint, Goal, ReadOptions
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.text import printable
from ckpt_formats.universal import Universal, manifest

PLACE = "{}"
"""Stands for the path of a state in the command."""
_LONGEST = 1 << 16
"""Characters of a line that is still read as one."""
_TRIAL = ".ckpt-trial"
"""Ends the name of the folder where states are evaluated. What is in it is whole, unlike what is staged."""


@dataclass(frozen=True)
class Evaluation:
    """The user's own measure of a state: a command whose last line of output is a loss."""

    command: tuple[str, ...]
    most: float
    """By how much the loss may increase."""
    target: Path
    """What is to be written. States are put beside it, one after the other, each in a folder that is removed."""


@dataclass(frozen=True)
class AcceptedStep:
    """What was found: the quantiser's step, and the losses of its state and of the exact one."""

    step: float
    loss: float
    exact: float


def search_step(
    codec: Subspace,
    evaluation: Evaluation,
    source: Checkpoint,
    write: Callable[[DeltaCodec, Path], object],
    effort: Resources,
) -> tuple[Subspace, AcceptedStep]:
    """The codec at the coarsest step that is accepted. `write` writes the source, with a codec, as a folder.

    Raises `Unsupported` if no step is, or if the command fails.
    """
    losses = dict[float, float]()
    with _beside(evaluation.target, effort.locks) as folder:
        exact = _loss_of(source, Universal(), evaluation, folder, effort)
        if not isfinite(exact):
            raise _refused(evaluation, f"says that the loss of the exact state is {exact}")
        report.say(f"trial: the exact state, loss {exact:.6g}")

        def increase(step: float) -> float:
            write(codec.at(step), folder / "coded")
            content = manifest.load(folder / "coded" / manifest.NAME).content
            coded = Universal().read(folder / "coded", ReadOptions())
            losses[step] = _loss_of(coded, Universal.again(content), evaluation, folder, effort)
            shutil.rmtree(folder / "coded")
            report.say(f"trial: step {step:.3g}, loss {losses[step]:.6g}, {losses[step] - exact:+.3g}")
            return inf if isnan(losses[step]) else losses[step] - exact

        step = coarsest(increase, evaluation.most)
    if step is None:
        finest = min(losses)
        raise Unsupported(
            f"even the finest step, {finest:g}, increases the loss from {exact:.6g} to {losses[finest]:.6g}, "
            f"by more than {evaluation.most:g}",
            hint="Allow more with --max-loss-increase; or leave it out, and nothing is lost.",
        )
    return codec.at(step), AcceptedStep(step, losses[step], exact)


@contextmanager
def _beside(target: Path, locks: bool) -> Iterator[Path]:
    """A folder for trials, which is removed. What a run that was killed left in it is removed before.

    Raises `Locked` if another process tries something for the same target.
    """
    folder = target.parent / f".{target.name}{_TRIAL}"
    with locked_folder(folder, target, locks):
        try:
            for left in folder.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _loss_of(state: Checkpoint, format: Universal, evaluation: Evaluation, folder: Path, effort: Resources) -> float:
    """What the command says of a state, which is written for it and removed."""
    target = folder / "state"
    work.write(state, format, Goal(target), "trial", effort, "writing a trial")
    found = _run(evaluation, target)
    shutil.rmtree(target)
    return found


def _run(evaluation: Evaluation, state: Path) -> float:
    """The number in the last line that the command prints. No shell sees it; its stderr is ours."""
    command = [word.replace(PLACE, str(state)) for word in evaluation.command]
    last = ""
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                while line := process.stdout.readline(_LONGEST):
                    last = line.decode("utf-8", "replace").strip() or last
            except KeyboardInterrupt:
                process.terminate()  # it may not have heard of it
                raise
    except OSError as error:
        raise _refused(evaluation, f"cannot be run: {error.strerror or error}") from None
    if process.returncode:
        raise _refused(evaluation, f"ended with {process.returncode}")
    try:
        return float(last)
    except ValueError:
        raise _refused(evaluation, f"ended with the line {last[:80]!r}, which is no number") from None


def _refused(evaluation: Evaluation, what: str) -> Unsupported:
    return Unsupported(
        f"--eval-cmd: {printable(evaluation.command[0])} {what}",
        hint=f"It gets the path of a universal checkpoint for {PLACE}; the last line it prints is the loss, a number.",
    )
