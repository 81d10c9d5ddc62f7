"""Kernels of deltas in C against those of an earlier checkout: `python benchmarks/kernels_deltas.py CODECS`.

CODECS is the folder `codecs` of a checkout that still has `ckpt_codecs/deltas/kernels` (commit f8571cd), compiled by
Numba. Its package is copied under another name, so that both run in one process, in turn, on the same chunk. What is
compared is what each gives, to the bit, then the CPU time of this thread: the median of the ratios of neighbours in
time. `fit` is that of a replayed delta. `--only` takes the beginnings of the names of rows.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ckpt_codecs import registry
from ckpt_codecs.delta import StatePair, StepInfo
from ckpt_codecs.native import deltas

Array = np.ndarray[Any, np.dtype[Any]]
N, COLUMNS = 1 << 18, 512
Pair = tuple[str, Callable[[], Any], Callable[[], Any]]
"""A row's name; what the earlier checkout does; what this one does."""


def load_earlier(codecs: Path) -> str:
    """The name under which the earlier package can be imported. Numba's cache stays beside the copy."""
    folder = Path(tempfile.gettempdir()) / "ckpt-kernels-before"
    if not (folder / "earlier_codecs").exists():
        shutil.copytree(codecs / "ckpt_codecs", folder / "earlier_codecs", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "earlier_codecs").rglob("*.py"):
            path.write_text(path.read_text().replace("ckpt_codecs", "earlier_codecs"))
    sys.path.insert(0, str(folder))
    return "earlier_codecs"


def halves(random: np.random.Generator, share: float, octaves: float) -> tuple[Array, Array]:
    """Words of bfloat16 weights before and after, of which such a share changes."""
    before = (random.normal(0, 0.02, N).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = np.exp2(random.uniform(0, octaves, N)).astype(np.int64) * random.choice([-1, 1], N)
    return before, before + np.where(random.random(N) < share, steps, 0).astype(np.uint16)


def pairs_of_kernels(old: Any) -> Iterator[Pair]:
    random, new = np.random.default_rng(1), deltas
    before = random.normal(0, 0.02, N).astype(np.float32).view(np.uint32)
    after = before + random.integers(-9000, 9000, N).astype(np.uint32)
    second = np.square(random.normal(0, 1e-3, N).astype(np.float32)).view(np.uint32)
    grown = second + random.integers(0, 1 << 21, N).astype(np.uint32)
    both = tuple(np.empty(N, np.uint32) for _ in range(2))
    yield "zigzag_bits", lambda: old.widest_step(before, after).bit_length(), lambda: new.zigzag_bits(before, after)
    planes = [[np.empty(N, np.uint8) for _ in range(3)] for _ in range(2)]
    yield (
        "split_zigzags",
        lambda: [old.steps(before, after, planes[0]), planes[0]],
        lambda: [new.split_zigzags(before, after, planes[1]), planes[1]],
    )
    yield (
        "merge_zigzags",
        lambda: [old.stepped(before, planes[0], both[0]), both[0]],
        lambda: [new.merge_zigzags(before, planes[1], both[1]), both[1]],
    )
    yield "root_units", lambda: old.root_units(second, -3), lambda: new.root_units(second, -3)
    yield (
        "growth_contexts",
        lambda: old.growth_contexts(second, grown, 0, 8),
        lambda: new.growth_contexts(second, grown, 0, 8),
    )
    rows, columns = (random.integers(-9, 9, size).astype(np.int8) for size in (N // COLUMNS, COLUMNS))
    yield "apply_drift", lambda: old.drifted(second, rows, columns), lambda: new.apply_drift(second, rows, columns)

    units = np.clip((before >> 23 & 255).astype(np.int64) - 6, 1, 254).astype(np.uint8)
    yield "to_grid", lambda: old.to_grid(before, after, units), lambda: new.to_grid(before, after, units)
    symbols, depths, bits = (part.copy() for part in new.to_grid(before, after, units))
    yield (
        "from_grid",
        lambda: [old.from_grid(before, units, symbols, depths, bits, both[0]), both[0]],
        lambda: [new.from_grid(before, units, symbols, depths, bits, both[1]), both[1]],
    )
    contexts = new.growth_contexts(second, grown, 0, 8)
    moved = [np.empty(N, np.uint8) for _ in range(2)]
    yield "count_contexts", lambda: old.count(contexts, 8), lambda: new.count_contexts(contexts, 8)
    yield (
        "gather",
        lambda: [old.gather(contexts, symbols, moved[0]), moved[0]],
        lambda: [new.gather(contexts, symbols, moved[1]), moved[1]],
    )
    yield (
        "scatter",
        lambda: [old.scatter(contexts, symbols, moved[0]), moved[0]],
        lambda: [new.scatter(contexts, symbols, moved[1]), moved[1]],
    )
    for share in (0.001, 0.02, 0.05):
        yield from pairs_of_sparse_steps(old, share)
    yield from pairs_of_ans_steps(old)
    yield from pairs_of_rows(old)
    yield from pairs_of_optimizers(old)


def pairs_of_sparse_steps(old: Any, share: float) -> Iterator[Pair]:
    before, after = halves(np.random.default_rng(2), share, 3)
    which = deltas.exponent_buckets(before, 7, 106, 16).copy()
    yield (
        "exponent_buckets",
        lambda: old.buckets(before, 7, 106, 16),
        lambda: deltas.exponent_buckets(before, 7, 106, 16),
    )
    many = int(np.count_nonzero(before != after))
    written = old.find_changes(before, after, which, 16, many)
    steps = deltas.find_steps(before, after, 7, 106, 16, many)
    yield (
        f"find_steps, {share:.1%}",
        lambda: old.find_changes(before, after, which, 16, many)[3],
        lambda: deltas.find_steps(before, after, 7, 106, 16, many)[3],
    )
    shifts = np.clip(np.frexp((written[3] + 1) / (np.bincount(written[0], minlength=16) + 1))[1] - 3, 0, 24)
    shifts, room = shifts.astype(np.uint8), [np.empty(2 * N, np.uint8) for _ in range(2)]
    yield (
        f"write_sparse_steps, {share:.1%}",
        lambda: room[0][: old.write_changes(*written, shifts, room[0])],
        lambda: room[1][: deltas.write_sparse_steps(*steps, shifts, room[1])],
    )
    data = room[1][: deltas.write_sparse_steps(*steps, shifts, room[1])].copy()
    out = [np.empty(N, np.uint16) for _ in range(2)]
    sizes = steps[3]
    yield (
        f"read_sparse_steps, {share:.1%}",
        lambda: [old.read_changes(data, before, which, sizes, out[0]), out[0]],
        lambda: [deltas.read_sparse_steps(data, before, 7, 106, 16, out[1]), out[1]],
    )


def pairs_of_ans_steps(old: Any) -> Iterator[Pair]:
    tables = import_module("ckpt_codecs.deltas.residuals.ans_steps")
    before, after = halves(np.random.default_rng(3), 0.4, 6)
    which = deltas.exponent_buckets(before, 7, 106, 16).copy()
    yield (
        "count_step_symbols",
        lambda: old.tally_steps(before, after, which, 16),
        lambda: deltas.count_step_symbols(before, after, which, 16),
    )
    symbols, counts, bits = (part.copy() for part in deltas.count_step_symbols(before, after, which, 16))
    weights = tables._weights(tables._rows(counts))
    yield (
        "write_ans_steps",
        lambda: old.write_steps(symbols, weights),
        lambda: deltas.write_ans_steps(symbols, weights),
    )
    states, words = (part.copy() for part in deltas.write_ans_steps(symbols, weights))
    out = [np.empty(N, np.uint16) for _ in range(2)]
    given = before, which, weights, states, words, bits
    yield (
        "read_ans_steps",
        lambda: [old.read_steps(*given, out[0]), out[0]],
        lambda: [deltas.read_ans_steps(*given, out[1]), out[1]],
    )


def pairs_of_rows(old: Any) -> Iterator[Pair]:
    random = np.random.default_rng(4)
    like = np.cumsum(random.integers(-2, 3, N)) % 200
    for name, plane in (("like", like), ("few", random.geometric(0.4, N) % 250), ("any", random.integers(0, 255, N))):
        rows = plane.astype(np.uint8)
        room = [np.empty(2 * N, np.uint8) for _ in range(2)]
        yield (
            f"write_rows, {name}",
            lambda rows=rows, room=room: room[0][: old.write_rows(rows, 109, room[0])],
            lambda rows=rows, room=room: room[1][: deltas.write_rows(rows, 109, room[1])],
        )
        data = room[1][: deltas.write_rows(rows, 109, room[1])].copy()
        out = [np.empty(N, np.uint8) for _ in range(2)]
        yield (
            f"read_rows, {name}",
            lambda data=data, out=out: [old.read_rows(data, 109, out[0]), out[0]],
            lambda data=data, out=out: [deltas.read_rows(data, 109, out[1]), out[1]],
        )


STEPS = (
    ("gradients", "infer_gradients", 2, (0.1,)),
    ("halves", "infer_bfloat16_gradients", 2, (0.7, 0.9, 0.1, 0)),
    ("first", "step_first_moments", 2, (0.9, 0.1, 0)),
    ("second", "step_second_moments", 2, (0.95, 0.05, 0)),
    ("weights_torch", "step_adam_torch", 3, (0.999, -1e-3, 0.9, 1e-8)),
    ("weights_divided", "step_adam_fused", 3, (0.999, -1e-3, 0.9, 1e-8)),
    ("weights_cpu_adam", "step_adam_deepspeed_cpu", 3, (0.999, -1e-3, 0.9, 1e-8)),
    ("weights_apex", "step_adam_apex", 3, (0.1, -1e-3, 0.9, 1e-8, 0.9)),
    ("carried", "extrapolate_weights", 5, (0.999, 0.5, 0.5)),
    ("descended", "step_momentum", 2, (0.999, -1e-3)),
    ("mixed", "mix", 2, (1.9, -0.9)),
    ("scaled", "scale", 1, (0.9,)),
)


def _step(name: str, given: tuple[Any, ...], out: Any) -> list[Any]:
    """What a kernel returns, and what it fills."""
    if name.startswith("step_adam_"):
        w, m, v, *numbers = given
        return [None, deltas.adam_steps(name, w, m, v, out)(*numbers)]
    return [getattr(deltas, name)(*given, out), out]


def pairs_of_optimizers(old: Any) -> Iterator[Pair]:
    random = np.random.default_rng(5)
    arrays = [np.abs(random.normal(0, 1e-3, N)).astype(np.float32) for _ in range(5)]
    for earlier, name, inputs, numbers in STEPS:
        kind = np.uint16 if earlier == "halves" else np.float32
        out = [np.empty(N, kind) for _ in range(2)]
        given = (*arrays[:inputs], *numbers)
        yield (
            name,
            lambda earlier=earlier, given=given, out=out: [getattr(old, earlier)(*given, out[0]), out[0]],
            lambda name=name, given=given, out=out: _step(name, given, out[1]),
        )


def adam(steps: int, bf16: bool = False) -> tuple[StatePair, StepInfo]:
    """A chunk of AdamW, some steps on."""
    random, shape = np.random.default_rng(6), (N // COLUMNS, COLUMNS)
    w, m, v = random.normal(0, 0.02, shape).astype(np.float32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    scales, states = np.exp(random.normal(0, 1, shape)) * 1e-3, []
    for t in range(1, 22 + steps):
        g = (scales * random.normal(0, 1, shape)).astype(np.float32)
        if bf16:
            g = (g.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) * np.float32(0.7234)
        m = (m + np.float32(0.1) * (g - m)).astype(np.float32)
        v = (np.float32(0.95) * v + np.float32(0.05) * g * g).astype(np.float32)
        under = np.sqrt(v) / np.float32((1 - 0.95**t) ** 0.5) + np.float32(1e-8)
        w = (w * np.float32(1 - 1e-4) - np.float32(1e-3 / (1 - 0.9**t)) * m / under).astype(np.float32)
        states.append({"fp32": w, "exp_avg": m, "exp_avg_sq": v})
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return StatePair(states[20], states[20 + steps]), StepInfo(21, 21 + steps, options)


def pairs_of_codecs(old: str) -> Iterator[Pair]:
    """Whole chunks: encoding, decoding and fitting."""
    earlier, kinds = import_module(f"{old}.registry"), import_module(f"{old}.delta")
    copies = [
        tuple(words.reshape(-1, COLUMNS) for words in halves(np.random.default_rng(7), s, 2)) for s in (0.01, 0.4)
    ]
    cases = {"1 step": adam(1), "1 step, bf16": adam(1, bf16=True), "10 steps": adam(10)}
    import ml_dtypes

    for share, (before, after) in zip(("1%", "40%"), copies, strict=True):
        states = ({"param": words.view(ml_dtypes.bfloat16)} for words in (before, after))
        cases[f"copy, {share} change"] = StatePair(*states), StepInfo()
    for title, (change, step) in cases.items():
        old_change = kinds.Change(change.before, change.after)
        old_step = kinds.Step(step.before, step.after, step.options)
        shape, form = next(iter(change.after.values())).shape, {n: v.dtype for n, v in change.after.items()}
        for name in ("replay", "difference"):
            codecs = earlier.delta_from_config({"name": name}), registry.delta_from_config({"name": name})

            def old_fit(codec: Any = codecs[0], change: Any = old_change, step: Any = old_step) -> Any:
                return codec.fit(lambda: iter([change]), step)

            def new_fit(codec: Any = codecs[1], change: Any = change, step: Any = step) -> Any:
                return codec.fit(lambda: iter([change]), step)

            fitted = old_fit(), new_fit()
            if name == "replay":
                yield (
                    f"fit, {title}",
                    lambda fit=old_fit: str(asdict(fit())),
                    lambda fit=new_fit: str(asdict(fit())),
                )
            yield (
                f"encode, {name}, {title}",
                lambda codec=fitted[0], change=old_change: bytes(codec.encode(change)),
                lambda codec=fitted[1], change=change: bytes(codec.encode(change)),
            )
            data = bytes(fitted[1].encode(change))
            yield (
                f"decode, {name}, {title}",
                lambda c=fitted[0], d=data, b=change.before, s=shape, f=form: list(c.decode(d, b, s, f).values()),
                lambda c=fitted[1], d=data, b=change.before, s=shape, f=form: list(c.decode(d, b, s, f).values()),
            )


def bits(result: Any) -> Any:
    if isinstance(result, np.ndarray):
        return result.tobytes()
    return [bits(part) for part in result] if isinstance(result, list | tuple) else result


def compare(pair: Pair, seconds: float) -> tuple[float, float, float]:
    """The ratio of the earlier time to this one's, and milliseconds of both: medians."""
    name, old, new = pair
    if bits(old()) != bits(new()):
        raise SystemExit(f"{name}: the results differ")
    times: tuple[list[float], list[float]] = ([], [])
    stop = time.monotonic() + seconds
    turns = [(old, times[0]), (new, times[1])]
    while time.monotonic() < stop or len(times[0]) < 5:
        for work, taken in turns:
            begun = time.thread_time()
            work()
            taken.append(time.thread_time() - begun)
        turns.reverse()
    ratios = [a / b for a, b in zip(*times, strict=True) if b > 0]
    return median(ratios), median(times[0]) * 1e3, median(times[1]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", type=Path, help="the folder `codecs` of the earlier checkout")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each row is measured")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    name = load_earlier(given.codecs)
    old = import_module(f"{name}.deltas.kernels")
    print("| | ratio | before, ms | now, ms |\n|---|---|---|---|")
    done = set()
    for pairs in (pairs_of_kernels(old), pairs_of_codecs(name)):
        for pair in pairs:
            if pair[0] in done or (given.only and not any(pair[0].startswith(start) for start in given.only)):
                continue
            done.add(pair[0])
            ratio, before, now = compare(pair, given.seconds)
            print(f"| {pair[0]} | {ratio:.2f} | {before:.3f} | {now:.3f} |", flush=True)


if __name__ == "__main__":
    main()
