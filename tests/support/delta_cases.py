"""Changes as training makes them, and as nobody would: chunks of all states of a parameter, before and after."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt_codecs import DeltaCodec
from ckpt_codecs.delta import StatePair, States, StepInfo
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from held import FLOATS, STORABLE, array

F32, F16, BF16 = DTYPES["float32"], DTYPES["float16"], DTYPES["bfloat16"]
DELTAS = [delta_from_config({"name": name}) for name in ("difference", "replay", "rows")]
Case = tuple[str, StatePair, StepInfo]
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def adam(
    shape: tuple[int, ...], steps: int = 1, seed: int = 0, bf16: bool = False, rate: float = 1e-3
) -> tuple[StatePair, StepInfo]:
    """Some steps of AdamW from a state that has seen a few, in NumPy: what a GPU makes differs in the last bits."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.normal(0, 1, shape)) * 1e-3
    state: dict[str, Array] = {
        "fp32": random.normal(0, 0.02, shape).astype(F32),
        "exp_avg": np.zeros(shape, F32),
        "exp_avg_sq": np.zeros(shape, F32),
    }
    states = [state]
    for t in range(1, 21 + steps):
        g = (scales * random.normal(0, 1, shape)).astype(F32)
        if bf16:
            g = g.astype(BF16).astype(F32) * np.float32(0.7234)
        m = (state["exp_avg"] + np.float32(0.1) * (g - state["exp_avg"])).astype(F32)
        v = (np.float32(0.95) * state["exp_avg_sq"] + np.float32(0.05) * g * g).astype(F32)
        under = np.sqrt(v) / np.float32((1 - 0.95**t) ** 0.5) + np.float32(1e-8)
        w = state["fp32"] * np.float32(1 - rate * 0.1) - np.float32(rate / (1 - 0.9**t)) * m / under
        state = {"fp32": w.astype(F32), "exp_avg": m, "exp_avg_sq": v}
        states.append(state)
    return StatePair(states[20], states[20 + steps]), StepInfo(20, 20 + steps, {**OPTIONS, "lr": rate})


def momentum(shape: tuple[int, ...], seed: int = 0) -> tuple[StatePair, StepInfo]:
    random = np.random.default_rng(seed)
    w, b, g = (random.normal(0, 0.02, shape).astype(F32) for _ in range(3))
    after = (np.float32(0.9) * b + g).astype(F32)
    later = (w.astype(np.float64) - np.float64(np.float32(0.05)) * after).astype(F32)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}
    return StatePair({"fp32": w, "momentum_buffer": b}, {"fp32": later, "momentum_buffer": after}), StepInfo(
        7, 8, options
    )


def only(change: StatePair, *names: str) -> StatePair:
    return StatePair({n: change.before[n] for n in names}, {n: change.after[n] for n in names})


def as_type(states: States, dtype: np.dtype[Any]) -> dict[str, Array]:
    return {name: values.astype(dtype) for name, values in states.items()}


def cases(seed: int = 0) -> Iterator[Case]:
    for shape in ((40, 64), (5000,), (33, 65), (600, 70)):
        for steps in (1, 10):
            yield f"adam-{steps}-{shape}", *adam(shape, steps, seed)
        yield f"adam-bf16-{shape}", *adam(shape, 1, seed, bf16=True)
    yield from small(seed)
    change, step = adam((300, 80), 1, seed)
    yield "anchor", StatePair({}, change.after), step
    yield "weights", only(change, "fp32"), step
    yield "without-second", only(change, "fp32", "exp_avg"), step
    for dtype in (F16, BF16):
        yield f"all-{dtype}", StatePair(as_type(change.before, dtype), as_type(change.after, dtype)), step
        copies = as_type(change.before, dtype)["fp32"], as_type(change.after, dtype)["fp32"]
        yield f"copy-{dtype}", StatePair({"param": copies[0]}, {"param": copies[1]}), step
        both = StatePair({**change.before, "param": copies[0]}, {**change.after, "param": copies[1]})
        yield f"masters-and-copy-{dtype}", both, step
    large = [np.maximum(change.before["exp_avg_sq"], s["exp_avg_sq"]) for s in (change.before, change.after)]
    amsgrad = [{**s, "max_exp_avg_sq": top} for s, top in zip((change.before, change.after), large, strict=True)]
    yield "amsgrad", StatePair(*amsgrad), step
    later, way = adam((600, 70), 10, seed)
    rows = np.exp2(np.random.default_rng(seed).normal(0, 1, (600, 1))).astype(F32)
    grown = {**later.after, "exp_avg_sq": later.after["exp_avg_sq"] * rows}
    yield "rows-grow", StatePair(later.before, grown), way
    yield "few-changes", *few_changes(seed)
    for many in (1, 200, 299, 300):
        yield f"table-{many}", *table(many, seed)
    yield "momentum", *momentum((70, 90), seed)
    yield "unchanged", StatePair(change.after, change.after), step
    other = adam((300, 80), 1, seed + 1)[0]
    yield "foreign", StatePair(other.before, change.after), step
    yield "wrong-options", change, StepInfo(None, None, {"lr": 77.0, "betas": [0.5, "x"], "eps": None})
    yield "no-options", change, StepInfo()
    zeros = {name: np.zeros_like(values) for name, values in change.after.items()}
    yield "from-zero", StatePair(zeros, change.after), step
    yield "to-zero", StatePair(change.before, zeros), step
    yield "counters", StatePair({"step": np.arange(900)}, {"step": np.arange(900) + 1}), step


def small(seed: int) -> Iterator[Case]:
    """States of random bits, of every type and awkward shape, each with another or none before."""
    for dtype in STORABLE:
        for shape in ((), (0,), (1,), (17,), (3, 0, 2), (7, 1, 3), (9, 70)):
            before, after = ({"param": array(dtype, shape, seed + i)} for i in range(2))
            yield f"bits-{dtype}-{shape}", StatePair(before, after), StepInfo()
    names = ("fp32", "exp_avg", "exp_avg_sq")
    for shape in ((), (0,), (1,), (30, 70)):
        states = [{name: array(F32, shape, 9 * i + j) for j, name in enumerate(names)} for i in range(2)]
        yield f"garbage-{shape}", StatePair(*states), StepInfo(1, 2, OPTIONS)
        yield f"garbage-later-{shape}", StatePair(*states), StepInfo(1, 9, OPTIONS)


def table(many: int, seed: int) -> tuple[StatePair, StepInfo]:
    """A table of 300 rows of which so many were stepped."""
    change, step = adam((300, 80), 1, seed)
    rows = np.random.default_rng(seed).permutation(300)[many:]
    after = {name: values.copy() for name, values in change.after.items()}
    for name, values in after.items():
        values[rows] = change.before[name][rows]
    return StatePair(change.before, after), step


def few_changes(seed: int) -> tuple[StatePair, StepInfo]:
    """Weights in bfloat16 of which few change."""
    random = np.random.default_rng(seed)
    before = random.normal(0, 0.02, (200, 90)).astype(BF16)
    after = before.copy().view(np.uint16)
    changed = random.random(before.shape) < 0.02
    after[changed] += random.choice(np.array([1, 65535, 300], np.uint16), int(changed.sum()), p=[0.49, 0.49, 0.02])
    return StatePair({"param": before}, {"param": after.view(BF16)}), StepInfo()


def fitted(codec: DeltaCodec, change: StatePair, step: StepInfo) -> DeltaCodec:
    return codec.fit(lambda: iter([change]), step)


def decoded(
    codec: DeltaCodec, data: bytes, change: StatePair, wanted: frozenset[str] | None = None
) -> dict[str, Array]:
    shape = next(iter(change.after.values())).shape
    return codec.decode(data, change.before, shape, {n: v.dtype for n, v in change.after.items()}, wanted)


__all__ = ["BF16", "DELTAS", "F16", "F32", "FLOATS", "Case", "adam", "cases", "decoded", "fitted", "momentum", "only"]
