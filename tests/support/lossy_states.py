"""Chunks of Adam's states for lossy codecs: training that keeps to a few directions, and what nobody trains on."""

from collections.abc import Iterator

import numpy as np

from ckpt_codecs.delta import DeltaCodec, StatePair, States
from ckpt_codecs.lossy import Excp, LcCheckpoint, Subspace
from ckpt_codecs.lossy.subspace import SubspaceRows
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from held import array

LOSSY: list[DeltaCodec] = [
    Subspace(),
    Subspace(step_size=1.0, rank=0, second_octaves=0.0, first_moments="coarse"),
    Subspace(max_abs_err=1e-4, first_moments="zero"),
    Subspace(rel_error=0.1, first_moments="exact"),
    SubspaceRows(rel_error=0.1),
    LcCheckpoint(),
    LcCheckpoint(2, coder="packed"),
    LcCheckpoint(3, coder="context"),
    Excp(alpha=1.0),
]
F32, BF16, F16 = (DTYPES[name] for name in ("float32", "bfloat16", "float16"))
SHAPES = [(96, 64), (24, 129), (2000,), (300,), (3, 5), (1,), (0,), (1, 70), (500, 8)]


def training(shape: tuple[int, ...], count: int, seed: int = 0) -> list[dict[str, Array]]:
    """States of so many steps, far apart, of a weight whose changes share a few directions."""
    random = np.random.default_rng(seed)
    rows, columns = (1, *shape)[-2:]
    rank = min(rows, columns, 4)
    left, right = random.standard_normal((rows, rank)), random.standard_normal((rank, columns))
    scales = np.exp(random.normal(0, 1, (rows, 1))) * np.exp(random.normal(0, 1, columns)) * 1e-8
    weights, steps = random.normal(0, 0.02, (rows, columns)), []
    for _ in range(count):
        update = (left * random.normal(1, 0.3, rank)) @ right + 0.3 * random.standard_normal((rows, columns))
        second = scales * random.chisquare(4, (rows, columns))
        weights = weights + 1e-3 * update
        states = {"fp32": weights, "exp_avg": -0.3 * np.sqrt(second) * update, "exp_avg_sq": second}
        steps.append({n: a.astype(F32).reshape(shape) for n, a in states.items()})
    return steps


def table(before: States, after: States, every: int) -> dict[str, Array]:
    """The states after, of which only so many rows changed: one of `every`."""
    rows = np.arange(len(after["fp32"])) % every == 0
    return {name: np.where(rows[:, None], values, before[name]) for name, values in after.items()}


def steady(before: States, after: States) -> dict[str, Array]:
    """The states after, of which most second moments are nearly those before: what deviates then deviates now."""
    second = before["exp_avg_sq"] * (0.9 + 0.2 * (np.arange(before["exp_avg_sq"].size) % 2)).reshape(
        after["fp32"].shape
    )
    second.reshape(-1)[::97] *= 300
    return {**after, "exp_avg_sq": second.astype(F32)}


def changes() -> Iterator[tuple[str, StatePair]]:
    """By name: ordinary ones, anchors, other types and states, and values that break what is taken for granted."""
    for shape in SHAPES:
        before, after = training(shape, 2)
        yield f"adam-{shape}", StatePair(before, after)
        yield f"anchor-{shape}", StatePair({}, after)
        yield f"weights-{shape}", StatePair({"fp32": before["fp32"]}, {"fp32": after["fp32"]})
        yield f"same-{shape}", StatePair(before, before)
        yield f"moments-alone-{shape}", StatePair({}, {n: a for n, a in after.items() if n != "fp32"})
    before, after = training((64, 48), 2)
    for every in (2, 9, 64):
        yield f"table-{every}", StatePair(before, table(before, after, every))
    for dtype in (BF16, F16, np.dtype(np.float64)):
        yield f"{dtype}", StatePair(*({n: a.astype(dtype) for n, a in s.items()} for s in (before, after)))
    momentum = [{"fp32": s["fp32"], "momentum_buffer": s["exp_avg"]} for s in (before, after)]
    yield "momentum", StatePair(*momentum)
    yield (
        "two-weights",
        StatePair(*({**s, "param": s["fp32"].astype(BF16), "other": s["exp_avg"]} for s in (before, after))),
    )
    yield from broken(before, after)


def broken(before: States, after: States) -> Iterator[tuple[str, StatePair]]:
    bits = {n: array(F32, a.shape, i) for i, (n, a) in enumerate(after.items())}
    yield "any-bits", StatePair(before, bits)
    yield "after-any-bits", StatePair(bits, after)
    for value in (np.nan, np.inf, -np.inf, 1e-42, 3e38, -0.0):
        for state in after:
            odd = {n: a.copy() for n, a in after.items()}
            odd[state][3, 5] = value
            yield f"{value}-in-{state}", StatePair(before, odd)
            yield f"{value}-before-in-{state}", StatePair(odd, after)
    empty = np.where(np.arange(48) % 3 == 0, np.float32(0), after["exp_avg_sq"])
    yield "steady-second", StatePair(before, steady(before, after))
    yield "zero-columns", StatePair(before, {**after, "exp_avg_sq": empty})
    yield "tiny-second", StatePair(before, {**after, "exp_avg_sq": after["exp_avg_sq"] * np.float32(1e-34)})
    yield "negative-second", StatePair(before, {**after, "exp_avg_sq": -after["exp_avg_sq"]})
    yield "huge-change", StatePair(before, {**after, "fp32": after["fp32"] * np.float32(1e38)})
    yield "zeros", StatePair(*({n: np.zeros_like(a) for n, a in after.items()} for _ in range(2)))
    yield "from-zeros", StatePair({n: np.zeros_like(a) for n, a in after.items()}, after)
