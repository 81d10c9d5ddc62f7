"""Write the golden published chain: `python sample_checkpoints/make_published.py`. No engine is needed.

`published-1.chain/` is published by two ranks of `tests/support/published.py`: a base, deltas of few and of many
changes, a fold, and an epoch that begins at an earlier step. `published-1.expected.json` has the XXH3-128 of every
tensor of each step, computed of the arrays themselves. A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codecs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from published import PublishedRun, Weights

HERE = Path(__file__).resolve().parent
NAME = "published-1"
CONFIG = {"model_type": "unknown", "hidden_size": 64}
SHARES = {1: 0.0, 2: 0.01, 3: 0.01, 4: 0.002, 5: 0.3, 6: 0.02}
"""The share of the values that each step changes."""


def weights_at(step: int, other: bool = False) -> Weights:
    random = np.random.default_rng(7)
    weight = random.normal(0, 0.02, (384, 256)).astype(ml_dtypes.bfloat16)
    half = random.normal(0, 1, 4099).astype(np.float16)
    norm = np.ones(64, np.float32)
    for one in range(2, step + 1):
        random = np.random.default_rng((one, other))
        for values in (weight, half):
            words = values.reshape(-1).view(np.int16)
            words += (random.random(words.size) < SHARES[one]) * random.choice([-3, -1, 1, 2], words.size).astype(
                np.int16
            )
        norm = norm + np.float32(random.normal(0, 1e-4, 64))
    return {"model.weight": weight, "model.half": half, "model.norm": norm, "scale": np.array(step, np.float32)}


def main() -> None:
    target = HERE / f"{NAME}.chain"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    expected = {}
    run = PublishedRun(target, weights_at(1), ranks=2, files={"config.json": json.dumps(CONFIG).encode()})
    for step in range(1, 7):
        run.publish(step, weights_at(step))
        if step == 5:
            run.fold(1, 5)
    run.epoch = 2
    for step in (5, 6):
        run.publish(step, weights_at(step, other=True))
    for step in range(1, 7):
        weights = weights_at(step, other=step >= 5)
        expected[step] = {name: xxhash.xxh3_128_hexdigest(values.tobytes()) for name, values in weights.items()}
    (HERE / f"{NAME}.expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
