"""Writes the golden chunks of lossy deltas: `python tests/golden_lossy/make.py`. No test runs it.

It never replaces a chunk: a released one must decode to the same bits forever. What the encoder of today writes of the
same states lies beside these, in `after`, and is renewed.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpt_codecs.delta import DeltaCodec, StatePair, States
from ckpt_codecs.lossy import LcCheckpoint, Subspace
from ckpt_codecs.lossy.subspace import SubspaceRows
from ckpt_formats.core.tensor import Array

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from lossy_states import BF16, steady, table, training  # noqa: E402


def chosen() -> Iterator[tuple[str, DeltaCodec, StatePair]]:
    """Small chunks with sections of every kind: name, codec, states."""
    before, after = training((40, 70), 2, 7)
    yield "adam", Subspace(), StatePair(before, after)
    holed = {**after, "exp_avg_sq": after["exp_avg_sq"] * (np.arange(70) % 9 > 0)}
    yield "holed", Subspace(step_size=0.01, second_octaves=0.5, first_moments="coarse"), StatePair(before, holed)
    yield "steady", Subspace(), StatePair(before, steady(before, holed))
    yield "anchor", Subspace(first_moments="zero"), StatePair({}, after)
    yield "weights", Subspace(step_size=1.0), StatePair({"fp32": before["fp32"]}, {"fp32": after["fp32"]})
    momentum = [{"fp32": s["fp32"], "momentum_buffer": s["exp_avg"] * np.float32(1e6)} for s in (before, after)]
    yield "momentum", Subspace(), StatePair(*momentum)
    yield "momentum-anchor", Subspace(), StatePair({}, momentum[1])
    copies = [{n: a.astype(BF16) for n, a in s.items()} for s in (before, after)]
    yield "bf16", Subspace(), StatePair(*copies)
    yield "vector", Subspace(), StatePair(*training((300,), 2, 7))
    yield "same", Subspace(first_moments="exact"), StatePair(before, {**after, "fp32": before["fp32"]})
    yield "table", SubspaceRows(), StatePair(before, table(before, after, 3))
    yield "lc", LcCheckpoint(3, coder="context"), StatePair(before, after)


def state_arrays(side: str, states: States) -> dict[str, Array]:
    """The bytes of states, each (n,) uint8, by their names in a file."""
    return {f"{side}-{name}": np.ascontiguousarray(v).reshape(-1).view(np.uint8) for name, v in states.items()}


def form(states: States) -> dict[str, str]:
    return {name: values.dtype.name for name, values in states.items()}


def main() -> None:
    for name, codec, change in chosen():
        target, encoded = HERE / f"{name}.npz", HERE / "after" / f"{name}.npz"
        shape = next(iter(change.after.values())).shape
        if not target.exists():
            data = codec.encode(change)
            decoded = codec.decode(data, change.before, shape, {n: a.dtype for n, a in change.after.items()})
            about = {"codec": codec.config(), "before": form(change.before), "decoded": form(decoded), "shape": shape}
            arrays = {"about": np.array(json.dumps(about)), "data": np.frombuffer(data, np.uint8)}
            np.savez_compressed(
                target,
                allow_pickle=False,
                **arrays,
                **state_arrays("before", change.before),
                **state_arrays("decoded", decoded),
            )
            print(f"{target.name}: {len(data)} bytes")
        after = state_arrays("after", change.after)
        if encoded.exists():  # other machines may compute other states
            with np.load(encoded) as earlier:
                after = {key: earlier[key] for key in after}
        true = {n: after[f"after-{n}"].view(a.dtype).reshape(shape) for n, a in change.after.items()}
        with np.load(target) as golden:
            old = {n: golden[f"before-{n}"].view(a.dtype).reshape(shape) for n, a in change.before.items()}
        data = codec.encode(StatePair(old, true))
        encoded.parent.mkdir(exist_ok=True)
        np.savez_compressed(encoded, allow_pickle=False, data=np.frombuffer(data, np.uint8), **after)


if __name__ == "__main__":
    main()
