"""Codecs of papers beside ours, on real trajectories: `python benchmarks/papers.py [FOLDER] --start 300`.

FOLDER is what `trajectory.py` made. Four parts, each a table:

    lossless   FM-Delta beside `difference` and `replay`: masters and moments, and the model's copies in bfloat16
    lossy      Delta-DNN, QD-Compressor and Inshrinkerator beside `subspace` and `lc`: of the weights alone, one delta
    embedding  rows that changed (Check-N-Run, IncrCP) beside our deltas, of tables that sparse gradients step
    scar       partial recovery and the choice of blocks, against a set-back of everything

Every codec decodes what it encoded, and is checked: all bits, or its bound. Seconds are of one thread's CPU time; the
papers' codecs are NumPy with our compiled Huffman code, so their seconds say little about the papers' own programs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log1p
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from papers import check_n_run, delta_dnn, fm_delta, inshrinkerator, qd
from states import START, default_folder, state_path

from ckpt_codecs import StatePair, StepInfo, delta_from_config
from ckpt_codecs.delta import DeltaCodec, States, only_changed_rows
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.encode_state import ROW_NBYTES

Array = np.ndarray[Any, np.dtype[Any]]
State = dict[str, States]
"""Of each parameter, arrays by state."""
MOMENTS = ("fp32", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Pair:
    name: str
    branch: str
    since: int


PAIRS = (
    Pair("1 step", "pretrain", 1),
    Pair("10 steps", "pretrain", 10),
    Pair("100 steps", "pretrain", 100),
    Pair("10 steps, rate 2e-5", "finetune", 10),
    Pair("1 step, rate 3e-6", "reinforce", 1),
)


@dataclass
class Measured:
    """What a codec made of a state; of a lossy one also how far that is from the true one."""

    raw: int = 0
    stored: int = 0
    encode: float = 0.0
    decode: float = 0.0
    worst: float = 0.0
    error: float = 0.0
    change: float = 0.0
    """Sums of squares: of the errors, and of the true change."""

    def add(self, raw: int, stored: int, encode: float, decode: float) -> None:
        self.raw, self.stored = self.raw + raw, self.stored + stored
        self.encode, self.decode = self.encode + encode, self.decode + decode

    def compare(self, decoded: Array, after: Array, before: Array) -> None:
        off, moved = (np.subtract(one, after, dtype=np.float64) for one in (decoded, before))
        self.worst = max(self.worst, float(np.abs(off).max(initial=0)))
        self.error, self.change = self.error + float((off**2).sum()), self.change + float((moved**2).sum())

    @property
    def relative(self) -> float:
        return float(np.sqrt(self.error / self.change)) if self.change else 0.0


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def load(path: Path, states: Sequence[str]) -> State:
    """The parameters that have all of these states. Masters in a file of `torch.save` are tensors of their own."""
    source = open_checkpoint(path)
    loaded: State = {}
    for name, parameter in source.parameters.items():
        master = source.parameters.get(f"{name}/fp32")
        tensors = {to_stored(state): one for state, one in parameter.states.items()}
        tensors |= {} if master is None else {"fp32": master.weight}
        if parameter.role != "extra" and set(states) <= tensors.keys():
            loaded[name] = {state: read(tensors[state]) for state in states}
    if not loaded:
        raise SystemExit(f"{path} has no parameter with {', '.join(states)}")
    return loaded


def chunks(before: States, after: States) -> Iterator[StatePair]:
    """As the universal format cuts a parameter."""
    chunking = Chunking.default(next(iter(after.values())).shape)
    for index in range(chunking.count):
        start, stop = chunking.range(index)
        form = chunking.chunk_shape(stop - start)
        yield StatePair(*({n: v.reshape(-1)[start:stop].reshape(form) for n, v in s.items()} for s in (before, after)))


def ours(codec: DeltaCodec, before: State, after: State, step: StepInfo, lossy: bool = False) -> Measured:
    """A delta codec of the wheel, with the rows of the index that its chunks take."""
    measured = Measured()
    if hasattr(codec, "survey"):
        changes = (c for n, s in after.items() for c in chunks(before[n], s))
        some = only_changed_rows(changes) if codec.name.endswith("rows") else changes
        codec = codec.survey(((next(iter(c.after.values())).size, c) for c in some), step)
    for name, states in after.items():
        old = before[name]
        fitted, fit = timed(lambda old=old, states=states: codec.fit(lambda: chunks(old, states), step))
        measured.add(0, 0, fit, 0)
        for change in chunks(old, states):
            form = {n: v.dtype for n, v in change.after.items()}
            shape = next(iter(change.after.values())).shape
            data, encode = timed(lambda fitted=fitted, change=change: fitted.encode(change))
            decoded, decode = timed(
                lambda f=fitted, data=data, c=change, shape=shape, form=form: f.decode(data, c.before, shape, form)
            )
            measured.add(sum(v.nbytes for v in change.after.values()), len(data) + ROW_NBYTES, encode, decode)
            for state, values in change.after.items():
                if lossy:
                    if state == "fp32":
                        measured.compare(decoded[state], values, change.before[state])
                else:
                    assert np.array_equal(raw(decoded[state]), raw(values)), (codec.name, name, state)
    return measured


def theirs(
    encode: Callable[[Array, Array], bytes],
    decode: Callable[[bytes, Array], Array],
    before: State,
    after: State,
    bound: Callable[[Array], float] | None = None,
) -> Measured:
    """A paper's codec, on each state of each parameter; `bound` None: lossless."""
    measured = Measured()
    for name, states in after.items():
        for state, values in states.items():
            old = before[name][state]
            data, encoding = timed(lambda values=values, old=old: encode(values, old))
            decoded, decoding = timed(lambda data=data, old=old: decode(data, old))
            measured.add(values.nbytes, len(data), encoding, decoding)
            if bound is None:
                assert np.array_equal(raw(decoded), raw(values)), (name, state)
            else:
                measured.compare(decoded, values, old)
                rounding = 1e-7 * float(np.abs(values).max(initial=0))  # to float32, at the end
                assert np.abs(decoded.astype(np.float64) - values).max(initial=0) <= 1.001 * bound(values) + rounding
    return measured


def clusters(bits: int, pruned: float, before: State, after: State) -> Measured:
    """Inshrinkerator: matrices in clusters, all else in bfloat16; a decoder has the clusters of the state before."""
    measured = Measured()
    for name, states in after.items():
        new, old = states["fp32"], before[name]["fp32"]
        if new.ndim < 2:
            measured.add(new.nbytes, new.nbytes // 2, 0, 0)
            measured.compare(new.astype(ml_dtypes.bfloat16).astype(np.float32), new, old)
            continue
        known = inshrinkerator.quantise(old, bits, pruned)
        quantised, fit = timed(lambda n=new, k=known: inshrinkerator.quantise(n, bits, pruned, k))
        data, encode = timed(lambda q=quantised, k=known: inshrinkerator.encode(q, k))
        decoded, decode = timed(lambda d=data, k=known: inshrinkerator.decode(d, k).values())
        measured.add(new.nbytes, len(data), fit + encode, decode)
        measured.compare(decoded.reshape(new.shape), new, old)
    return measured


def raw(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def header(*cells: str) -> None:
    print("\n| " + " | ".join(cells) + " |\n|" + "---|" * len(cells), flush=True)


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def step_of(folder: Path, pair: Pair, start: int) -> StepInfo:
    source = open_checkpoint(state_path(folder, pair.branch, start + pair.since))
    options = dict(source.groups[0].options) if source.groups else {}
    return StepInfo(start, start + pair.since, options)


def lossless(folder: Path, start: int) -> None:
    header("pair", "states", "codec", "ratio", "encoding, s", "decoding, s")
    for pair in PAIRS:
        step = step_of(folder, pair, start)
        for states in (MOMENTS, ("param",)):
            before, after = (
                load(path, states)
                for path in (state_path(folder, step=start), state_path(folder, pair.branch, start + pair.since))
            )
            results = {
                "FM-Delta": theirs(fm_delta.encode, fm_delta.decode, before, after),
                **{
                    f"`{name}`": ours(delta_from_config({"name": name}), before, after, step)
                    for name in ("difference", "replay")
                },
            }
            for name, measured in results.items():
                kind = "masters and moments" if states == MOMENTS else "copies, bfloat16"
                ratio = f"{measured.raw / measured.stored:.3f}"
                row(pair.name, kind, name, ratio, f"{measured.encode:.2f}", f"{measured.decode:.2f}")


def lossy(folder: Path, start: int) -> None:
    header("pair", "codec", "ratio", "largest error", "error / change", "encoding, s", "decoding, s")
    for pair in PAIRS[1:4]:
        step = step_of(folder, pair, start)
        before, after = (
            load(path, MOMENTS)
            for path in (state_path(folder, step=start), state_path(folder, pair.branch, start + pair.since))
        )
        weights = [{n: {"fp32": s["fp32"]} for n, s in state.items()} for state in (before, after)]
        for eps in (1e-2, 1e-3, 1e-4, 1e-5):
            measured = theirs(
                lambda new, old, eps=eps: delta_dnn.encode(new, old, eps),
                delta_dnn.decode,
                *weights,
                lambda values, eps=eps: log1p(eps),
            )
            _lossy_row(pair, f"Delta-DNN, eps {eps:g}", measured)
        for bits in (8, 10, 12):
            measured = theirs(
                lambda new, old, bits=bits: qd.encode(new, old, bits),
                qd.decode,
                *weights,
                lambda values, bits=bits: qd.step_size(values, bits) / 2,
            )
            _lossy_row(pair, f"QD, {bits} bits", measured)
        for bits in (4, 5):
            _lossy_row(pair, f"Inshrinkerator, {bits} bits, 20 % pruned", clusters(bits, 0.2, *weights))
        for error in (1e-2, 1e-3, 1e-4, 1e-5):
            codec = delta_from_config({"name": "subspace", "max_abs_err": log1p(error)})
            _lossy_row(pair, f"`subspace:max_abs_err={log1p(error):.3g}`", ours(codec, *weights, step, lossy=True))
        for size in (0.18, 0.7, 1.0, 2.0, 4.0):
            codec = delta_from_config({"name": "subspace", "step_size": size})
            _lossy_row(pair, f"`subspace:step_size={size:g}`", ours(codec, *weights, step, lossy=True))
        codec = delta_from_config({"name": "lc", "bits": 3})
        _lossy_row(pair, "`lc`, 3 bits", ours(codec, *weights, step, lossy=True))
        codec = delta_from_config({"name": "subspace", "step_size": 2.0})
        _lossy_row(pair, "`subspace:step_size=2`, with moments", ours(codec, before, after, step, lossy=True))


def _lossy_row(pair: Pair, name: str, measured: Measured) -> None:
    figures = f"{measured.raw / measured.stored:.1f}", f"{measured.worst:.2g}", f"{measured.relative:.3f}"
    row(pair.name, name, *figures, f"{measured.encode:.2f}", f"{measured.decode:.2f}")


def embedding() -> None:
    import torch
    from papers.embedding_run import OPTIMIZERS, EmbeddingRun

    torch.set_num_threads(1)
    header("optimizer", "steps", "rows that changed", "codec", "ratio", "encoding, s", "decoding, s", "error / change")
    for optimizer in OPTIMIZERS:
        run = EmbeddingRun(optimizer)
        run.train(300)
        before, done = run.state(), 0
        for since in (1, 20, 200):
            run.train(since - done)
            done = since
            after = run.state()
            share = _touched(before, after)
            step = StepInfo(300, 300 + since, {})
            exact = theirs(check_n_run.encode, check_n_run.decode, before, after)
            results = {"Check-N-Run, exact": exact}
            for name in ("difference", "replay", "rows"):
                results[f"`{name}`"] = ours(delta_from_config({"name": name}), before, after, step)
            for bits in (8, 4):
                results[f"Check-N-Run, {bits} bits"] = theirs(
                    lambda new, old, bits=bits: check_n_run.encode(new, old, bits),
                    check_n_run.decode,
                    before,
                    after,
                    lambda values: float(values.max() - values.min()),
                )
            results["`subspace`"] = ours(delta_from_config({"name": "subspace"}), before, after, step, lossy=True)
            for size in (0.25, 2.0):
                codec = delta_from_config({"name": "subspace-rows", "step_size": size})
                results[f"`subspace-rows:step_size={size:g}`"] = ours(codec, before, after, step, lossy=True)
            for name, measured in results.items():
                error = f"{measured.relative:.3f}" if measured.change else "0"
                figures = (
                    f"{measured.raw / measured.stored:.1f}",
                    f"{measured.encode:.2f}",
                    f"{measured.decode:.2f}",
                    error,
                )
                row(optimizer, str(since), f"{share:.2%}", name, *figures)


def _touched(before: State, after: State) -> float:
    rows = [check_n_run.touched(after[name]["fp32"], before[name]["fp32"]) for name in after]
    return sum(int(mask.sum()) for mask in rows) / sum(mask.size for mask in rows)


def scar(failures: int) -> None:
    import torch
    from papers.scar import measure

    torch.set_num_threads(1)
    header("network", "blocks lost", "strategy", "perturbation", "iterations", "less than all back")
    for network, many in (("MLR", failures), ("MLP", max(1, failures // 3))):
        for share in (0.25, 0.5, 0.75):
            first = None
            for name, cost in measure(network, share, many):
                first = cost if first is None else first
                less = f"{1 - cost.iterations / first.iterations:.0%}" if first.iterations else ""
                row(network, f"{share:.0%}", name, f"{cost.perturbation:.3f}", f"{cost.iterations:.1f}", less)


PARTS = ("lossless", "lossy", "embedding", "scar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--start", type=int, default=START, help="the step t from which the branches part")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--failures", type=int, default=30)
    given = parser.parse_args()
    if "lossless" in given.parts:
        lossless(given.folder, given.start)
    if "lossy" in given.parts:
        lossy(given.folder, given.start)
    if "embedding" in given.parts:
        embedding()
    if "scar" in given.parts:
        scar(given.failures)


if __name__ == "__main__":
    main()
