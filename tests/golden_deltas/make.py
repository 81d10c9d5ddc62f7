"""Makes the golden chunks of deltas: `python tests/golden_deltas/make.py NAME ...`. No test runs it.

A chunk that is here already is not made again: what was written once is read for ever.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpt_codecs.delta import DeltaCodec, StatePair, States, StepInfo
from ckpt_codecs.deltas.difference import Difference
from ckpt_formats.core.tensor import Array

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from delta_cases import BF16, DELTAS, F16, Case, adam, as_type, few_changes, fitted, momentum, only  # noqa: E402


def chosen() -> Iterator[Case]:
    """A part of every kind, small."""
    shape = (40, 64)
    one, step = adam(shape, 1, 7)
    yield "adam", one, step
    yield "adam-bf16", *adam(shape, 1, 7, bf16=True)
    ten, way = adam(shape, 10, 7)
    rows = np.exp2(np.random.default_rng(7).normal(0, 1, (40, 1))).astype(np.float32)
    yield "several-steps", StatePair(ten.before, {**ten.after, "exp_avg_sq": ten.after["exp_avg_sq"] * rows}), way
    yield "anchor", StatePair({}, one.after), step
    yield "weights", only(one, "fp32"), step
    large = [{**states, "max_exp_avg_sq": one.after["exp_avg_sq"] * 2} for states in (one.before, one.after)]
    yield "amsgrad", StatePair(*large), step
    copies = [{**states, "param": as_type(states, BF16)["fp32"]} for states in (one.before, one.after)]
    copies[1]["param"].view(np.uint16)[::7] += 1
    yield "masters-and-copy", StatePair(*copies), step
    yield "momentum", *momentum(shape, 7)
    many = adam((150, 64), 1, 7)[0]
    yield "copy", StatePair(*({"param": as_type(states, BF16)["fp32"]} for states in (many.before, many.after))), step
    yield "few-changes", *few_changes(7)
    few, many = copies_that_change()
    yield "sparse-steps", few, StepInfo()
    yield "ans-steps", many, StepInfo()
    untouched = np.arange(40) % 7 > 1
    table = {name: np.where(untouched[:, None], one.before[name], values) for name, values in one.after.items()}
    yield "table", StatePair(one.before, table), step
    yield "counters", StatePair({"step": np.arange(900)}, {"step": np.arange(900) + 1}), step


def copies_that_change() -> tuple[StatePair, StatePair]:
    """Copies in 16 bits of which few values change, and of which many do, by steps of every size."""
    random = np.random.default_rng(7)
    before = random.normal(0, 0.02, (150, 64)).astype(BF16)
    few, many = (before.copy().view(np.uint16) for _ in range(2))
    few[random.random(few.shape) < 0.03] += 1
    steps = np.round(np.exp2(random.uniform(0, 15.5, many.shape)) * random.choice([-1, 1], many.shape)).astype(np.int64)
    many += np.where(random.random(many.shape) < 0.3, steps, 0).astype(np.uint16)
    return StatePair({"param": before}, {"param": few.view(BF16)}), StatePair(
        {"param": before}, {"param": many.view(BF16)}
    )


def masked_steps() -> Iterator[tuple[str, StatePair]]:
    """Weights of which few change, by steps of every size; of each class of exponents some."""
    for dtype in (BF16, F16):
        random = np.random.default_rng(7)
        before = (random.normal(0, 1, (150, 64)) * np.exp2(random.uniform(-16, 0, (150, 64)))).astype(dtype)
        after = before.copy().view(np.uint16)
        steps = np.round(np.exp2(random.exponential(1.5, after.shape))) * random.choice([-1, 1], after.shape)
        after += np.where(random.random(after.shape) < 0.06, steps, 0).astype(np.int64).astype(np.uint16)
        yield f"masked-steps-{dtype.name}", StatePair({"param": before}, {"param": after.view(dtype)})


def stored(side: str, states: States) -> dict[str, Array]:
    return {f"{side}-{name}": np.ascontiguousarray(v).reshape(-1).view(np.uint8) for name, v in states.items()}


def dtypes(states: States) -> dict[str, str]:
    return {name: values.dtype.name for name, values in states.items()}


def main(names: list[str]) -> None:
    cases: list[tuple[DeltaCodec, str, StatePair, StepInfo]] = [
        *((codec, *case) for case in chosen() for codec in DELTAS),
        *((Difference(speed="fast"), name, change, StepInfo()) for name, change in masked_steps()),
    ]
    for codec, name, change, step in cases:
        called = f"{codec.name}-{name}"
        target = HERE / f"{called}.npz"
        if (names and called not in names) or target.exists():
            continue
        ready = fitted(codec, change, step)
        about = {"codec": ready.config(), "before": dtypes(change.before), "after": dtypes(change.after)}
        about["shape"] = next(iter(change.after.values())).shape
        content = {
            "about": np.array(json.dumps(about)),
            **stored("before", change.before),
            **stored("after", change.after),
        }
        content["chunk"] = np.frombuffer(ready.encode(change), np.uint8)
        np.savez_compressed(target, allow_pickle=False, **content)
        print(f"{target.name}: {content['chunk'].size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
