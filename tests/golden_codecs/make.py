"""Makes the golden chunks: `python tests/golden_codecs/make.py NAME ...`. No test runs it.

A chunk that is here already is not made again: what was written once is read for ever.
"""

import json
import sys
from pathlib import Path

import numpy as np

from ckpt_codecs import Codec, FirstMoment, Integers, Planes, SecondMoment, Zstd
from ckpt_codecs.gradients import Bfloat16Gradients, ExactGradients, Int8Gradients
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array

HERE = Path(__file__).parent
F32, F16, BF16 = DTYPES["float32"], DTYPES["float16"], DTYPES["bfloat16"]


@np.errstate(all="ignore")
def chunks() -> dict[str, tuple[Codec, Array, Array | None]]:
    random = np.random.default_rng(20)
    weights = random.normal(0, 0.02, (24, 80)).astype(F32)
    weights.view(np.uint32)[0, :6] = 0x80000000, 1, 0x7FC12345, 0xFF800001, 0x7F800000, 0xFF800000
    scales = np.exp(random.normal(0, 2, 80)) * np.exp(random.normal(0, 1, (24, 1)))
    second = (scales * random.chisquare(3, weights.shape) * 1e-8).astype(F32)
    second[7] = 0
    first = (np.sqrt(second) * random.normal(0, 1, second.shape)).astype(F32)
    tokens = random.integers(0, 40000, 3000)
    rounded = weights.reshape(-1)[6:606].astype(BF16).astype(F32)
    sparse = np.where(random.random(600) < 0.1, rounded + weights[4:12].reshape(-1)[:600], F32.type(0))
    columns = np.where(np.arange(130) % 2, 1, 6) * np.where(random.random((40, 1)) < 0.5, 1, 6)
    codes = np.minimum(np.floor(np.abs(random.normal(0, 1, (40, 130))) * columns), 127)
    codes[:, ::65] = 127  # so every scale is 2**-13, and values are exact
    multiples = (codes * 2.0**-13).astype(F32)
    stored = multiples.reshape(-1)[:1500].copy()
    stored[700] = np.nan
    return {
        "planes-float32": (Planes(), weights, None),
        "planes-bfloat16": (Planes(), weights.astype(BF16), None),
        "planes-float16": (Planes(), weights.astype(F16), None),
        "planes-float64": (Planes(), weights.astype(np.float64), None),
        "planes-float8": (Planes(), weights.astype(DTYPES["float8_e4m3fn"]), None),
        "planes-complex64": (Planes(), (weights + 1j * weights).astype(np.complex64), None),
        "planes-positive": (Planes(), np.abs(random.normal(0, 1, 4001)).astype(F32), None),
        "planes-sparse": (Planes(), np.where(random.random(9000) < 0.05, 1.5, 0).astype(F32), None),
        "first-moment": (FirstMoment(), first, second),
        "first-moment-bfloat16": (FirstMoment(), first.astype(BF16), second.astype(BF16)),
        "first-moment-flat": (FirstMoment(), first.reshape(-1), second.reshape(-1)),
        "second-moment": (SecondMoment(), second, None),
        "integers-int64": (Integers(), tokens, None),
        "integers-zigzag": (Integers(), np.arange(5000), None),
        "integers-bool": (Integers(), random.random(9000) < 0.02, None),
        "integers-three": (Integers(), random.integers(0, 3, 9000).astype(np.uint8), None),
        "integers-few": (Integers(), random.choice(7, 9000, p=[0.8, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01]), None),
        "zstd": (Zstd(), np.tile(tokens, 3), None),
        "raw": (Planes(), weights.reshape(-1)[:5], None),
        "constant": (Planes(), np.full((3, 50), 0.25, F32), None),
        "gradients-multiples": (ExactGradients(), rounded * F32.type(0.7), None),
        "gradients-sparse": (ExactGradients(), sparse, None),
        "gradients-bf16": (Bfloat16Gradients(), rounded, None),
        "gradients-int8": (Int8Gradients(), stored, None),
        "gradients-int8-columns": (Int8Gradients(), multiples, None),
    }


def as_bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def main(names: list[str]) -> None:
    for name, (codec, values, base) in chunks().items():
        target = HERE / f"{name}.npz"
        if (names and name not in names) or target.exists():
            continue
        about = {"codec": codec.config(), "dtype": values.dtype.name, "shape": values.shape}
        about["base"] = None if base is None else base.dtype.name
        content = {"about": np.array(json.dumps(about)), "values": as_bytes(values)}
        if base is not None:
            content["base"] = as_bytes(base)
        content["chunk"] = np.frombuffer(codec.encode(values, base), np.uint8)
        np.savez_compressed(target, allow_pickle=False, **content)
        print(f"{target.name}: mode {content['chunk'][0]}, {content['chunk'].size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
