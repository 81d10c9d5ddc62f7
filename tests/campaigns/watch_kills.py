"""Kill what stores the checkpoints of a run elsewhere and prunes it, at a change to the file system or at any moment.

After each kill, each step is in the run, whole, or in the target, with the same values; what is in the target is whole.
The next watch stores the rest, each once, and leaves what one that nobody disturbed leaves.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ckpt as library
from killing import killed, killed_after, points
from prune_kills import STEPS, VALUES, make_run
from run import Round, alternated

KEEP = "last:1"
NEWEST = "step-40"


def watch(work: Path, target: str) -> None:
    for one in library.runs.watch(work / "run", work / target, keep=KEEP, every=0.01, once=True):
        assert not isinstance(one, library.types.SkippedCheckpoint), one


def values(checkpoint: library.Checkpoint) -> float:
    """The value that all weights have."""
    weights, biases = checkpoint["layer.weight"].weight[:], checkpoint["layer.bias"].weight[:]
    assert weights.tolist() == [[weights[0, 0]] * 8] * 4
    assert biases.tolist() == [weights[0, 0]] * 8
    return float(weights[0, 0])


def stored(work: Path, target: str) -> dict[str, float]:
    """What the target has, by the names of the run's checkpoints."""
    place = work / target
    if target.endswith(".chain"):
        chain = library.Chain(place) if (place / "chain.json").exists() else {}
        return {f"step-{step}": values(chain[step]) for step in chain}
    names = [one.name for one in place.iterdir() if not one.name.startswith(".")] if place.exists() else []
    return {name: values(library.open(place / name)) for name in names}


def look(work: Path, target: str) -> Counter[str]:
    """Assert what must hold at every moment; return where the checkpoints are."""
    elsewhere = stored(work, target)
    assert elsewhere == {name: VALUES[name] for name in elsewhere}
    seen: Counter[str] = Counter()
    for name, value in VALUES.items():
        try:
            here = values(library.open(work / "run" / name)) == value
        except library.CkptError:
            here = False
        assert here or name in elsewhere, f"{name} is lost"
        seen["in both" if here and name in elsewhere else "in the run" if here else "in the target"] += 1
    return seen


def kill_round(original: Path, work: Path, target: str, generator: random.Random) -> Counter[str]:
    """Kill a watch once or more, then finish it."""

    def renew() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        shutil.copytree(original, work / "run")

    renew()
    one = partial(watch, work, target)
    count = points(one, work)
    finished = look(work, target)
    assert finished == {"in the target": len(STEPS) - 1, "in both": 1}
    renew()
    seen: Counter[str] = Counter()
    for _ in range(generator.choice((1, 1, 2, 3))):
        if generator.random() < 0.2:
            killed_after(one, generator.random() * 0.5)
            seen["killed by SIGKILL"] += 1
        else:
            killed(one, work, generator.randrange(count))
        seen += look(work, target)
    one()
    assert look(work, target) == finished
    assert sorted(path.name for path in (work / "run").iterdir()) == ["notes.txt", NEWEST, "tensorboard"]
    left = [path for path in work.rglob(".*") if "ckpt-" in path.name and path.is_dir()]
    assert not left, left
    if target.endswith(".chain"):
        assert not library.Chain(work / target).verify().findings
    assert len(stored(work, target)) == len(STEPS)
    return seen


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Yield kills of a watch that appends to a chain and of one that copies, in turn."""
    generator = random.Random(seed)
    original = folder / "original"
    make_run(original)
    yield from alternated(
        {
            name: partial(kill_round, original, folder / "work", target, generator)
            for name, target in (("chain", "run.chain"), ("copies", "copies"))
        }
    )
