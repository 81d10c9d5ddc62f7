"""Write the golden family of models: `python tests/golden_family/make.py`. No engine is needed.

`family-1.chain/` has a base, a fine-tune and a fine-tune of that, a model of which most bytes lie in a pack of the
base, a model of another base, and one that was written again because its parent was removed.
`family-1.expected.json` has the XXH3-128 of every tensor of each model, computed of the arrays themselves. A golden
file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "codecs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from ckpt.chains.chain import Chain
from ckpt.chains.compact import Retention
from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from held import checkpoint, parameter

HERE = Path(__file__).resolve().parent
NAME = "family-1"
Weights = dict[str, Array]


def weights(seed: int) -> Weights:
    random = np.random.default_rng(seed)
    shapes = {"embed.weight": (64, 40), "layer.weight": (300, 170), "norm.bias": (40,)}
    return {name: random.normal(0, 0.02, shape).astype(DTYPES["bfloat16"]) for name, shape in shapes.items()}


def tuned(before: Weights, seed: int, rate: float, only: str = "") -> Weights:
    random = np.random.default_rng(seed)
    moved = {name: x.astype(np.float32) + random.normal(0, rate, x.shape) for name, x in before.items()}
    return {name: moved[name].astype(x.dtype) if only in name else x for name, x in before.items()}


def main() -> None:
    target = HERE / f"{NAME}.chain"
    shutil.rmtree(target, ignore_errors=True)
    models: dict[str, Weights] = {"base": weights(0)}
    models["math"] = tuned(models["base"], 1, 1e-4)
    models["math-dpo"] = tuned(models["math"], 2, 3e-5)
    models["removed"] = tuned(models["base"], 3, 1e-4)
    models["again"] = tuned(models["removed"], 4, 3e-5)
    models["embed"] = tuned(models["base"], 5, 1e-3, only="embed")
    models["other"] = weights(6)
    family = Chain(target)
    for name, values in models.items():
        parameters = [parameter(key, {"model": x}) for key, x in values.items()]
        family.append(checkpoint(parameters, origin=Origin("held", None, None)), name=name)
    family.compact(Retention(remove=("removed",)))
    (target / "chain.lock").unlink()
    expected = {
        name: {key: xxhash.xxh3_128_hexdigest(x.tobytes()) for key, x in values.items()}
        for name, values in models.items()
        if name != "removed"
    }
    (HERE / f"{NAME}.expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
