"""What lossy deltas save, and what it costs to go on from them: `python benchmarks/lossy.py [--quick]`.

Ratios mean little without the loss of the training that goes on from the restored state, less that of the run which
was never stopped, on the same batches. That is told in **lost steps**, too: how many steps older the exact
state would have to be that costs as much. An older exact state is what one has without storing anything.

    digits   LC-Checkpoint's own setting: plain SGD, four small networks on scikit-learn's digits, weights alone
    single   a GPT with AdamW: a chain of five deltas, restored once; all of its state, beta2 .95 and .999
    ten      the same GPT, ten times restored: training really goes on from each reconstruction
    chain    twenty deltas and their anchor: the ratio with everything counted
    budget   where bits go and what they buy: a chain on the uninterrupted run, with nothing trained from it
    speed    MB of state a second of CPU time, one thread

Codecs are ours (`subspace`), LC-Checkpoint (`lc`), ExCP, a uniform quantiser with zstd, and the largest 3 %
(`top-k`). LC and top-k know nothing of moments: these are kept exact beside them and not counted. Every figure is
kept in `results.json` in the folder `--out`; what is there is not run again. `--plot FILE` draws them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from lossy_runs import NETWORKS, Digits, Gpt, State
from states import default_folder

from ckpt_codecs.delta import DeltaCodec, StatePair, States, StepInfo
from ckpt_codecs.lossy import Excp, LcCheckpoint, Subspace
from ckpt_codecs.lossy.byte_reader import ByteReader
from ckpt_codecs.lossy.state_types import in_order, is_small
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.universal.encode_state import ROW_NBYTES

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Delta:
    """A way to store a state: bytes it took, and what is restored."""

    nbytes: int
    state: State


Method = Callable[[State, State], Delta]
"""From the reconstruction before, and the true state, to a delta."""


@dataclass(frozen=True)
class Entry:
    method: Method
    whole: bool = True
    """Are moments counted, or kept exact beside it?"""


def chunks(before: States, after: States) -> Iterator[tuple[slice, StatePair]]:
    shape = next(iter(after.values())).shape
    cut, size = Chunking.default(shape).chunk, prod(shape)
    for start in range(0, size, prod(cut)):
        part = slice(start, min(start + prod(cut), size))
        form = (part.stop - part.start,) if (part.stop - part.start) % cut[-1] or len(cut) == 1 else (-1, cut[-1])
        both = [{n: a.reshape(-1)[part].reshape(form) for n, a in states.items()} for states in (before, after)]
        yield part, StatePair(*both)


def by_codec(codec: DeltaCodec, watch: Callable[[bytes, StatePair], None] | None = None) -> Method:
    """All parameters, chunk by chunk, with the directory that the format stores beside them.

    `watch` is called with each chunk and what it was made of.
    """

    def method(before: State, after: State) -> Delta:
        old = {name: before.get(name, {}) for name in after}
        surveyed = codec
        if hasattr(codec, "survey"):
            samples = ((states["fp32"].size, c) for n, states in after.items() for _, c in chunks(old[n], states))
            surveyed = codec.survey(samples, StepInfo())
        nbytes, restored = 0, {}
        for name, states in after.items():

            def changes(name: str = name, states: States = states) -> Iterator[StatePair]:
                return (change for _, change in chunks(old[name], states))

            fitted, form = surveyed.fit(changes, StepInfo()), {n: a.dtype for n, a in states.items()}
            restored[name] = {n: np.empty(a.size, a.dtype) for n, a in states.items()}
            for part, change in chunks(old[name], states):
                data = fitted.encode(change)
                if watch is not None:
                    watch(data, change)
                nbytes += len(data) + ROW_NBYTES
                shape = next(iter(change.after.values())).shape
                for n, values in fitted.decode(data, change.before, shape, form).items():
                    restored[name][n][part] = values.reshape(-1)
            restored[name] = {n: a.reshape(states[n].shape) for n, a in restored[name].items()}
        return Delta(nbytes, restored)

    return method


def weights_alone(method: Method) -> Method:
    """The weights by this method; moments exact, uncounted."""

    def alone(before: State, after: State) -> Delta:
        only = [{n: {"fp32": s["fp32"]} for n, s in state.items()} for state in (before, after)]
        delta = method(*only)
        return Delta(delta.nbytes, {n: {**s, **delta.state[n]} for n, s in after.items()})

    return alone


def alone(method: Method, name: str) -> Method:
    """Only this state is restored from its bytes, all others are exact: which of them costs the loss?"""

    def mixed(before: State, after: State) -> Delta:
        delta = method(before, after)
        return Delta(delta.nbytes, {n: {**s, name: delta.state[n][name]} for n, s in after.items()})

    return mixed


def top_k(share: float) -> Method:
    """The largest changes of all weights as float16, their places as gaps; zstd."""

    def method(before: State, after: State) -> Delta:
        deltas = {n: s["fp32"] - before[n]["fp32"] for n, s in after.items()}
        size = np.sort(np.abs(np.concatenate([d.reshape(-1) for d in deltas.values()])))
        least, restored, nbytes = size[int(size.size * (1 - share))], {}, 0
        for name, delta in deltas.items():
            kept = np.flatnonzero(np.abs(delta.reshape(-1)) >= least)
            gaps = np.diff(kept, prepend=0)
            wide = np.concatenate(
                [np.minimum(gaps, 255).astype(np.uint8), gaps[gaps > 254].astype(np.uint32).view("u1")]
            )
            values = delta.reshape(-1)[kept].astype(np.float16)
            nbytes += len(_zstd(wide)) + len(_zstd(values.view(np.uint8).reshape(-1, 2).T))
            change = np.zeros(delta.size, np.float32)
            change[kept] = values
            restored[name] = {"fp32": before[name]["fp32"] + change.reshape(delta.shape)}
        return Delta(nbytes, restored)

    return method


def uniform(step: float) -> Method:
    """Weights in steps of the change's root mean square, first moments of their own, second in octaves; zstd."""

    def method(before: State, after: State) -> Delta:
        deltas = [s["fp32"] - before[n]["fp32"] for n, s in after.items()]
        scale = step * sqrt(sum(float((d**2).sum()) for d in deltas) / sum(d.size for d in deltas))
        restored: State = {}
        nbytes = 0
        for name, states in after.items():
            restored[name] = {}
            for state, true in states.items():
                old = before[name][state]
                if state == "exp_avg_sq":
                    with np.errstate(divide="ignore"):
                        codes = np.clip(np.rint(np.log2(true)), -140, 100)
                    restored[name][state] = np.where(true > 0, np.exp2(codes), 0).astype(np.float32)
                    codes = codes - np.clip(np.rint(np.log2(np.maximum(old, 1e-40))), -140, 100)
                else:
                    each = scale if state == "fp32" else step * float(np.sqrt((true**2).mean())) or 1.0
                    base = old if state == "fp32" else np.float32(0)
                    codes = np.rint((true - base) / each)
                    restored[name][state] = (base + codes * np.float32(each)).astype(np.float32)
                nbytes += len(_zstd(codes.astype(np.int16).view(np.uint8).reshape(-1, 2).T))
        return Delta(nbytes, restored)

    return method


def _zstd(plane: Array) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(np.ascontiguousarray(plane).tobytes())


EXCP = Excp(alpha=1.0)
"""With its default `alpha` next to nothing is pruned of a small model; its published ratio needs the cap."""
CODECS: dict[str, Subspace] = {
    **{f"subspace {s:g}": Subspace(step_size=s) for s in (1, 1.25, 1.5, 2, 2.5, 3, 4, 6)},
    "subspace 2, no basis": Subspace(step_size=2.0, rank=0),
    **{
        f"subspace {s:g}, second_octaves {o:g}": Subspace(step_size=s, second_octaves=o)
        for s in (1.25, 1.5, 1.75, 2, 2.5)
        for o in (0, 6, 8)
    },
}
METHODS: dict[str, Entry] = {
    **{name: Entry(by_codec(codec)) for name, codec in CODECS.items()},
    **{
        f"subspace 2, {state} alone": Entry(alone(by_codec(Subspace()), state))
        for state in ("fp32", "exp_avg", "exp_avg_sq")
    },
    "lc 2-bit": Entry(weights_alone(by_codec(LcCheckpoint(2))), False),
    "lc 2-bit packed": Entry(weights_alone(by_codec(LcCheckpoint(2, coder="packed"))), False),
    "lc 3-bit": Entry(weights_alone(by_codec(LcCheckpoint(3))), False),
    "lc 3-bit global": Entry(weights_alone(by_codec(LcCheckpoint(3, "state"))), False),
    "lc 3-bit global packed": Entry(weights_alone(by_codec(LcCheckpoint(3, "state", "packed"))), False),
    "excp": Entry(by_codec(EXCP)),
    "uniform + zstd": Entry(uniform(2.0)),
    "top-k 3 %": Entry(weights_alone(top_k(0.03)), False),
}
DIGITS = (
    *("lc 2-bit", "lc 2-bit packed", "lc 3-bit", "lc 3-bit global", "lc 3-bit global packed"),
    *("top-k 3 %", "subspace 2", "subspace 4", "subspace 6"),
)
ASKED = tuple(name for name in METHODS if "second_octaves" in name or "alone" in name)
"""Methods that run only where `--methods` names them."""
SINGLE = tuple(name for name in METHODS if "packed" not in name)
TEN = (
    *ASKED,
    *("subspace 1", "subspace 1.25", "subspace 1.5", "subspace 2", "subspace 3", "subspace 4"),
    *("lc 3-bit global", "excp", "uniform + zstd", "subspace 2, no basis", "lc 2-bit", "top-k 3 %"),
)


def _size(state: State, whole: bool) -> int:
    return sum(a.nbytes for states in state.values() for n, a in states.items() if whole or n == "fp32")


class Results:
    """Figures by part and name, on the disk as soon as they are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def run(self, part: str, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.known.setdefault(part, {}):
            began = time.monotonic()
            self.known[part][name] = make()
            self.path.write_text(json.dumps(self.known, indent=1))
            figures = {k: round(v, 4) if isinstance(v, float) else v for k, v in self.known[part][name].items()}
            print(f"{part}: {name}: {figures} ({time.monotonic() - began:.0f} s)", flush=True)
        return dict(self.known[part][name])


def digits(results: Results, network: str, seed: int) -> None:
    """A chain of five deltas, an epoch apart, from the third epoch on; restored, and two epochs more."""
    run = Digits(network, 3 + seed)
    part, epoch, states, at = f"digits {network} {seed}", run.epoch, [], 0
    for number in range(3, 9):
        run.train(at, number * epoch)
        at = number * epoch
        states.append(run.state())
    buffers = run.buffers()

    def goes_on(state: State, shift: int = 0) -> tuple[float, float]:
        run.restore(state, at, buffers)
        return float(np.mean(run.train(at, at + 2 * epoch, shift))), run.validate()

    reference = goes_on(states[-1])
    results.run(part, "other data order", lambda: _lost(goes_on(states[-1], 100 * epoch), reference, 0.0))
    results.run(part, "an epoch older", lambda: _lost(goes_on(states[-2]), reference, 0.0))
    for name in DIGITS:

        def make(name: str = name) -> dict[str, Any]:
            entry, held, ratios = METHODS[name], states[0], []
            for state in states[1:]:
                delta = entry.method(held, state)
                ratios.append(_size(state, entry.whole) / delta.nbytes)
                held = delta.state
            return _lost(goes_on(held), reference, 5 / sum(1 / r for r in ratios))

        results.run(part, name, make)


def _lost(measured: tuple[float, float], reference: tuple[float, float], ratio: float) -> dict[str, Any]:
    return {"ratio": ratio, "train": measured[0] - reference[0], "validation": measured[1] - reference[1]}


class Trajectory:
    """States of an uninterrupted run, every `interval` steps, kept in a folder."""

    def __init__(self, folder: Path, beta2: float, seed: int, interval: int) -> None:
        self.run, self.interval = Gpt(beta2, seed), interval
        self._folder, self._name = folder, f"gpt-{beta2}-{seed}"

    def state(self, step: int) -> State:
        path = self._path(step)
        if not path.exists():
            earlier = max((s for s in range(0, step, self.interval) if s and self._path(s).exists()), default=0)
            if earlier:
                self.run.restore(self._load(earlier), earlier)
            else:
                self.run.__init__(self.run.optimizer.param_groups[0]["betas"][1], self.run.seed)  # type: ignore[misc]
            self.run.train(earlier, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **{f"{n}|{s}": a for n, states in self.run.state().items() for s, a in states.items()})
        return self._load(step)

    def _path(self, step: int) -> Path:
        return self._folder / f"{self._name}-{step}.npz"

    def _load(self, step: int) -> State:
        loaded: State = {}
        with np.load(self._path(step)) as held:
            for key in held.files:
                name, state = key.split("|")
                loaded.setdefault(name, {})[state] = held[key]
        return loaded


def single(
    results: Results, trajectory: Trajectory, beta2: float, start: int, further: int, names: Sequence[str]
) -> None:
    """A chain of five deltas, restored at its end, and so many steps more; older exact states for comparison."""
    run, every = trajectory.run, trajectory.interval
    end, part = start + 5 * every, f"single {beta2:g} seed {trajectory.run.seed}"
    states = [trajectory.state(start + i * every) for i in range(6)]

    def goes_on(state: State, shift: int = 0) -> tuple[float, float]:
        run.restore(state, end)
        return float(np.mean(run.train(end, end + further, shift))), run.validate()

    reference = results.run(
        part, "reference", lambda: dict(zip(("train", "validation"), goes_on(states[-1]), strict=True))
    )
    exact = reference["train"], reference["validation"]
    results.run(part, "other data order", lambda: {"validation": goes_on(states[-1], 50_000)[1] - exact[1]})
    for older in (every // 5, every // 2, every, 2 * every):

        def stale(older: int = older) -> dict[str, Any]:
            return _lost(goes_on(trajectory.state(end - older)), exact, 0.0)

        results.run(part, f"{older} steps older", stale)
    for name in names:

        def make(name: str = name) -> dict[str, Any]:
            entry, held, nbytes, raw = METHODS[name], states[0], 0, 0
            for state in states[1:]:
                delta = entry.method(held, state)
                held, nbytes, raw = delta.state, nbytes + delta.nbytes, raw + _size(state, entry.whole)
            return _lost(goes_on(held), exact, raw / nbytes)

        results.run(part, name, make)


def ten(results: Results, trajectory: Trajectory, beta2: float, start: int, every: int, names: Sequence[str]) -> None:
    """Restored ten times: after every so many steps training goes on from what was stored."""
    run, times, part = trajectory.run, 10, f"ten {beta2:g} seed {trajectory.run.seed}"

    def goes(method: Entry | None, shift: int = 0) -> tuple[float, float, float]:
        held = trajectory.state(start)
        run.restore(held, start)
        nbytes = raw = 0
        losses: list[float] = []
        for i in range(times):
            losses = run.train(start + i * every, start + (i + 1) * every, shift)
            if method is not None:
                delta = method.method(held, run.state())
                held, nbytes, raw = delta.state, nbytes + delta.nbytes, raw + _size(held, method.whole)
                run.restore(held, start + (i + 1) * every)
        return float(np.mean(losses)), run.validate(), raw / nbytes if nbytes else 0.0

    exact = results.run(part, "reference", lambda: dict(zip(("train", "validation"), goes(None)[:2], strict=True)))

    def less(measured: tuple[float, float, float]) -> dict[str, Any]:
        return _lost(measured[:2], (exact["train"], exact["validation"]), measured[2])

    for name in names:
        results.run(part, name, lambda name=name: less(goes(METHODS[name])))  # type: ignore[misc]
    results.run(part, "other data order", lambda: less(goes(None, 50_000)))


def chain(results: Results, trajectory: Trajectory, beta2: float, start: int, many: int) -> None:
    """A lossy anchor, and deltas on it; no training goes on, since `single` and `ten` say what that costs."""
    for name, codec in {
        "resume": Subspace(step_size=1.0),
        "balanced": Subspace(),
        "archive": Subspace(step_size=4.0),
    }.items():

        def make(codec: Subspace = codec) -> dict[str, Any]:
            held: State = {}
            sizes, raw = [], 0
            for i in range(many + 1):
                state = trajectory.state(start + i * trajectory.interval)
                delta = by_codec(codec)(held, state)
                held, raw = delta.state, _size(state, True)
                sizes.append(delta.nbytes)
            return {"ratio": raw * (many + 1) / sum(sizes), "anchor": raw / sizes[0], "last": raw / sizes[-1]}

        results.run(f"chain of {many} {beta2:g}", name, make)


def budget(results: Results, trajectory: Trajectory, beta2: float, start: int, names: Sequence[str]) -> None:
    """A chain of five deltas on the uninterrupted run: bits of each state, the error, the loss of the stored weights.

    Bits: of the last delta, by state, of matrices or of vectors, for each of their values. Error: of matrices, relative
    to the last change, each square times the fourth root of the second moment, as the codec scales it. Nothing is
    trained, so a codec takes seconds: this ranks candidates for `single` and `ten`.
    """
    states = [trajectory.state(start + i * trajectory.interval) for i in range(6)]
    run, part = trajectory.run, f"budget {beta2:g} seed {trajectory.run.seed}"

    def loss(state: State) -> float:
        run.restore(state, start + 5 * trajectory.interval)
        return run.validate()

    exact = results.run(part, "reference", lambda: {"validation": loss(states[-1])})["validation"]
    for name in names:

        def make(name: str = name) -> dict[str, Any]:
            held, sizes, counts, nbytes, raw = states[0], Counter[str](), Counter[str](), 0, 0

            def watch(data: bytes, change: StatePair) -> None:
                kind = "vector" if is_small(next(iter(change.after.values())).shape) else "matrix"
                source, form = ByteReader(data), {n: a.dtype for n, a in change.after.items()}
                for state in in_order(form):
                    source.take(1)
                    sizes[f"{state}/{kind}"] += len(source.part())
                    counts[f"{state}/{kind}"] += change.after[state].size

            for state in states[1:]:
                sizes.clear()
                counts.clear()
                delta = by_codec(CODECS[name], watch)(held, state)
                held, nbytes, raw = delta.state, nbytes + delta.nbytes, raw + _size(state, True)
            bits = {key: 8 * size / counts[key] for key, size in sizes.items()}
            errors = [_weighted(other, states[-1]) for other in (held, states[-2])]
            rest = {"error": sqrt(errors[0] / errors[1]), "validation": loss(held) - exact}
            return {"ratio": raw / nbytes, **bits, **rest}

        results.run(part, name, make)


def _weighted(state: State, true: State) -> float:
    """The squared error of all matrices of weights, each square times the fourth root of the second moment."""
    return sum(
        float((np.square(state[n]["fp32"] - s["fp32"], dtype=np.float64) * s["exp_avg_sq"] ** 0.25).sum())
        for n, s in true.items()
        if s["fp32"].ndim == 2
    )


def moved(shape: tuple[int, int]) -> StatePair:
    """States of a weight that moves in a few directions, as real ones do."""
    random, (rows, columns) = np.random.default_rng(0), shape
    along = random.standard_normal((24, columns))

    def step() -> Array:
        few = random.standard_normal((rows, 24)) @ (along * np.linspace(2, 0.3, 24)[:, None])
        return (few + random.standard_normal(shape)).astype(np.float32)

    before, after = step(), step()
    second = (np.exp(random.normal(0, 1, (rows, 1))) * np.exp(random.normal(0, 1, columns)) * 1e-8).astype(np.float32)
    weights = random.normal(0, 0.02, shape).astype(np.float32)
    seconds = [(second * random.chisquare(3, shape)).astype(np.float32) for _ in range(2)]
    olds = {"fp32": weights, "exp_avg": np.sqrt(seconds[0]) * before, "exp_avg_sq": seconds[0]}
    news = {"fp32": weights + 1e-4 * after, "exp_avg": np.sqrt(seconds[1]) * after, "exp_avg_sq": seconds[1]}
    return StatePair(*({n: a.astype(np.float32) for n, a in states.items()} for states in (olds, news)))


def flat(change: StatePair) -> StatePair:
    return StatePair(*({n: a.reshape(-1) for n, a in states.items()} for states in (change.before, change.after)))


def speed(results: Results) -> None:
    """On chunks as the format cuts them: by codec, and ours by shape. Encoding decodes what it has made."""
    usual, ours = moved((1024, 256)), Subspace()
    works: dict[str, tuple[DeltaCodec, StatePair]] = {
        **{f"subspace {s}": (Subspace(step_size=float(s)), usual) for s in (1, 2, 3)},
        "subspace 2, no basis": (Subspace(rank=0), usual),
        "subspace 2, anchor": (ours, StatePair({}, usual.after)),
        **{f"subspace 2, {n} x {m}": (ours, moved((n, m))) for n, m in ((512, 512), (256, 1024), (128, 256))},
        "subspace 2, flat": (ours, flat(usual)),
        "subspace 2, vector": (ours, flat(moved((1, 1024)))),
        "lc 3-bit": (LcCheckpoint(3), usual),
        "excp": (EXCP, usual),
    }
    for name, (codec, change) in works.items():

        def make(codec: DeltaCodec = codec, change: StatePair = change) -> dict[str, Any]:
            data, form = codec.encode(change), {n: a.dtype for n, a in change.after.items()}
            shape, size = change.after["fp32"].shape, sum(a.nbytes for a in change.after.values())
            times = [
                min(_timed(work) for _ in range(7))
                for work in (lambda: codec.encode(change), lambda: codec.decode(data, change.before, shape, form))
            ]
            return {"encode MB/s": size / times[0] / 1e6, "decode MB/s": size / times[1] / 1e6}

        results.run("speed", name, make)


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()  # others may be at work on this machine
    work()
    return time.process_time() - began


def lost_steps(part: dict[str, dict[str, float]], validation: float) -> float:
    """How much older the exact state would have to be that costs as much validation loss: by a line through nothing."""
    older = {float(n.split()[0]): figures["validation"] for n, figures in part.items() if n.endswith("steps older")}
    slope = sum(n * loss for n, loss in older.items()) / sum(n * n for n in older)
    return max(0.0, validation / slope) if slope > 0 else 0.0


Parts = dict[str, dict[str, dict[str, float]]]


def pooled(known: Parts) -> Parts:
    """Means over the seeds of each part, and of how many there are."""
    seeds: dict[str, list[dict[str, dict[str, float]]]] = {}
    for part, figures in known.items():
        seeds.setdefault(part.partition(" seed ")[0], []).append(figures)
    return {part: _mean(figures) for part, figures in seeds.items()}


def _mean(parts: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    means: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        rows = [part[name] for part in parts if name in part]
        means[name] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]} | {"seeds": len(rows)}
    return means


def table(parts: Parts) -> None:
    for part, by_method in parts.items():
        columns = list(dict.fromkeys(k for figures in by_method.values() for k in figures))
        calibrated = any(name.endswith("steps older") for name in by_method)
        print(
            f"\n{part}\n  {'':32}"
            + "".join(f"{c:>{_width(c)}}" for c in columns)
            + ("   lost steps" if calibrated else "")
        )
        for name, figures in by_method.items():
            row = "".join(f"{_cell(c, figures.get(c)):>{_width(c)}}" for c in columns)
            lost = f"{lost_steps(by_method, figures['validation']):13.0f}" if calibrated and name != "reference" else ""
            print(f"  {name:32}{row}{lost}")


def _width(column: str) -> int:
    return max(14, len(column) + 2)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column == "seeds":
        return str(value)
    if column in ("train", "validation"):
        return f"{value:+.4f}"
    return f"{value:.3f}" if column == "error" or column.endswith(("/matrix", "/vector")) else f"{value:.1f}"


def plot(known: Parts, path: Path) -> None:
    """Ratio against loss, for every part where training went on from the GPT's restored states."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = sorted(part for part in known if part.startswith(("single", "ten")))
    figure, (row,) = plt.subplots(1, len(parts), figsize=(4.6 * len(parts), 4.4), squeeze=False)
    for axes, part in zip(row, parts, strict=True):
        key = "train" if part.startswith("ten") else "validation"
        ours = []
        for name, figures in known[part].items():
            if name.endswith("steps older"):
                axes.axhline(figures[key], color="grey", lw=0.6, ls=":")
                axes.text(11, figures[key], name, fontsize=6, color="grey", va="bottom")
            elif name.startswith("subspace") and "," not in name:
                ours.append((figures["ratio"], figures[key]))
            elif figures.get("ratio"):
                counted = "whole state" if METHODS[name].whole else "weights alone"
                axes.plot(figures["ratio"], figures[key], "s", label=f"{name} ({counted})")
        axes.plot(*zip(*sorted(ours), strict=True), "o-", color="black", label="subspace (whole state)")
        axes.set_xscale("log")
        axes.set_xlim(10, 200)
        axes.set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
        axes.minorticks_off()
        axes.set_yscale("symlog", linthresh=0.01)
        axes.margins(y=0.15)
        axes.set(title=part, xlabel="ratio", ylabel=f"{key} loss above the uninterrupted run")
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


PARTS = ("speed", "digits", "single", "ten", "chain", "budget")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_folder().with_name("ckpt-lossy"))
    parser.add_argument("--quick", action="store_true", help="a minute or two: fewer steps, restores, networks' seeds")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--beta2", nargs="*", type=float, default=[0.95, 0.999])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=tuple(n for n in METHODS if n not in ASKED))
    parser.add_argument("--further", type=int, default=50, help="steps that go on from a single restore")
    parser.add_argument("--between", type=int, default=50, help="steps from one of ten restores to the next")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.out / "quick" if given.quick else given.out
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "results.json")
    interval, start = (10, 60) if given.quick else (50, 1000)
    further, between = (10, 5) if given.quick else (given.further, given.between)
    if "speed" in given.parts:
        speed(results)
    if "digits" in given.parts:
        for network in NETWORKS:
            for seed in range(given.seeds):
                digits(results, network, seed)
    works = {
        "single": lambda t, b: single(results, t, b, start, further, [n for n in SINGLE if n in given.methods]),
        "ten": lambda t, b: ten(results, t, b, start, between, [n for n in TEN if n in given.methods]),
        "budget": lambda t, b: budget(results, t, b, start, tuple(CODECS)),
        "chain": lambda t, b: chain(results, t, b, *((start, 5) if given.quick else (start - 10 * interval, 20))),
    }
    for part, work in works.items():
        for beta2 in given.beta2 if part in given.parts else ():
            for seed in range(1, 1 + given.seeds):
                work(Trajectory(folder, beta2, seed, interval), beta2)
    table(pooled(results.known))
    if given.plot:
        plot(pooled(results.known), given.plot)


if __name__ == "__main__":
    main()
