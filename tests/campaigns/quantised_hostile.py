"""Quantised checkpoints of any bytes end in values or in a `CkptError`: `python quantised_hostile.py 100000`.

Each read takes a tiny model of one scheme, changes its parts, their names, shapes and types, or what the configuration
states, opens it, dequantises it and reads a block of each weight. Memory is bounded by the size of the file: no weight
has more elements than `MAX_ELEMENTS`. A failure prints the seed, which repeats it alone: ... 1 --seed SEED
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "never_silent"), str(ROOT / "tests" / "support")]

from test_quantised import BF16, CASES, E4M3, E5M2, F16, F32, I8, I32, I64, U8, random_array, write_safetensors  # noqa: E402

from ckpt_formats.core.errors import CkptError  # noqa: E402
from ckpt_formats.registry.opening import open_checkpoint  # noqa: E402

MAX_ELEMENTS = 1 << 20
TYPES = (BF16, F16, F32, U8, I8, I32, I64, E4M3, E5M2)
WORDS = (None, True, 0, -1, 1, 3, 64, 128, 1 << 40, 0.5, "", "gptq", "gptq_v2", "gemv", [128, 128], [1, 32], [0, 0], {})
KEYS = (
    "weight_block_size",
    "bits",
    "checkpoint_format",
    "version",
    "quant_method",
    "group_size",
    "quantization_config",
)


def changed(random: np.random.Generator, values: Any) -> Any:
    """A part with other bytes, or of another type or shape."""
    kind, raw = random.integers(0, 5), np.ascontiguousarray(values)
    if kind < 2 and raw.size:
        data = raw.reshape(-1).view(U8).copy()
        data[random.integers(0, data.size, random.integers(1, 5))] ^= random.integers(1, 256, 1).astype(U8)
        return data.view(raw.dtype).reshape(raw.shape)
    shape = list(raw.shape)
    if kind == 2 and shape:
        shape[random.integers(0, len(shape))] = int(random.choice([0, 1, 2, 3, 31, 33, 65]))
    elif kind == 3:
        shape = [int(n) for n in random.choice([1, 2, 8, 32, 64], random.integers(0, 4))]
    dtype = raw.dtype if kind < 4 else TYPES[random.integers(0, len(TYPES))]
    return random_array(tuple(shape), dtype, int(random.integers(0, 1 << 30)))


def one(folder: Path, seed: int) -> str:
    random = np.random.default_rng(seed)
    name = list(CASES)[random.integers(0, len(CASES))]
    case = CASES[name]
    tensors = {
        f"{case.module}.{own}": case.values.get(own, random_array(*form, 0)) for own, form in case.layout.items()
    }
    for _ in range(random.integers(1, 4)):
        key = list(tensors)[random.integers(0, len(tensors))]
        action = random.integers(0, 8)
        if action == 0 and len(tensors) > 1:
            del tensors[key]
        elif action == 1:
            other = list(CASES.values())[random.integers(0, len(CASES))]
            tensors[f"{case.module}.{list(other.layout)[random.integers(0, len(other.layout))]}"] = tensors[key]
        else:
            tensors[key] = changed(random, tensors[key])
    config = dict(case.config or {})
    if random.random() < 0.3:
        config[KEYS[random.integers(0, len(KEYS))]] = WORDS[random.integers(0, len(WORDS))]
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "quantization_config": config}))
    try:
        result = open_checkpoint(folder).cast(("fp32", "bf16", "fp16")[seed % 3])
        for parameter in result.values():
            weight = parameter.weight
            assert weight.size <= MAX_ELEMENTS, f"{weight.size} elements"
            ends = [sorted(random.integers(0, n + 1, 2).tolist()) for n in weight.shape]
            np.asarray(weight[tuple(slice(low, high) for low, high in ends)])
    except CkptError as error:
        return type(error).__name__
    return "values"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    seen, failed, start = Counter[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seed, given.seed + given.reads):
            try:
                seen[one(Path(folder), seed)] += 1
            except Exception as error:
                failed += 1
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if time.monotonic() - start > given.seconds or failed > 20:
                break
    print(f"{sum(seen.values()):,} reads: {dict(seen)}; {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
