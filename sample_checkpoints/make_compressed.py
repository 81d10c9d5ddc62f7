"""Write the golden compressed checkpoint: `python sample_checkpoints/make_compressed.py`. No engine is needed.

`universal-1-coded/` has states encoded by every codec at every level, with one chunk and with several, and states that
are stored as they are. `universal-1-coded.expected.json` has the XXH3-128 of every state's values, computed here before
anything is encoded. A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codecs"))

from ckpt_codecs import CODECS, find
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor, read
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal import PackContent, Universal

HERE = Path(__file__).resolve().parent
NAME = "universal-1-coded"


def drawn(dtype: str, *shape: int, seed: int = 0, scale: float = 0.02) -> Array:
    """Normally distributed values. The stream of MT19937 never changes."""
    values = np.random.RandomState(seed).standard_normal(shape) * scale
    return values.astype(np.float64).astype(DTYPES[dtype])


def trained(rows: int, columns: int, seed: int) -> dict[str, Array]:
    """A master, its copy, and moments that are correlated as after training."""
    master = drawn("float32", rows, columns, seed=seed)
    columnwise = np.exp(drawn("float32", columns, seed=seed + 1, scale=1.0))
    second = ((drawn("float32", rows, columns, seed=seed + 2, scale=1e-4)) * columnwise).astype(np.float32) ** 2
    first = (np.sqrt(second) * drawn("float32", rows, columns, seed=seed + 3, scale=1.0)).astype(np.float32)
    return {"fp32": master, "exp_avg": first, "exp_avg_sq": second, "param": master.astype(DTYPES["bfloat16"])}


def sparse(dtype: str, *shape: int, seed: int = 0) -> Array:
    """300 random values, all others zero: several chunks in a small file."""
    values = np.zeros(int(np.prod(shape)), DTYPES[dtype])
    places = np.random.RandomState(seed).randint(0, values.size, 300)
    values[places] = drawn("float32", 300, seed=seed, scale=3.0).astype(values.dtype)
    return values.reshape(shape)


def odd(dtype: str) -> Array:
    """Both zeros, the smallest denormal, infinities, NaNs of both signs with a payload, repeated."""
    bits = {
        "float32": [0, 1 << 31, 1, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001, 0xFFA0_0001],
        "bfloat16": [0, 1 << 15, 1, 0x7F80, 0xFF80, 0x7FC1, 0xFFA1],
    }[dtype]
    return np.resize(np.array(bits, f"u{DTYPES[dtype].itemsize}"), 700).view(DTYPES[dtype])


def parameters() -> Iterator[tuple[str, dict[str, Array], EncodingOptions]]:
    """Name, states and options of encoding of each parameter."""
    for level in LEVELS:
        yield f"trained.{level}", trained(40, 96, 1), EncodingOptions(level=level)
        several = {"fp32": sparse("float32", 700, 900, seed=1), "param": sparse("bfloat16", 700, 900, seed=2)}
        several |= {
            "exp_avg": sparse("float32", 700, 900, seed=3),
            "exp_avg_sq": sparse("float32", 700, 900, seed=4) ** 2,
        }
        yield f"several.chunks.{level}", several, EncodingOptions(level=level)
    for name in CODECS:
        codec = find(name)
        if codec.lossless and name != "rounded":
            for dtype in ("float32", "bfloat16", "int32"):
                moments = {
                    "exp_avg": drawn(dtype, 30, 70, scale=2.0),
                    "exp_avg_sq": drawn(dtype, 30, 70, seed=1, scale=2.0),
                }
                yield f"by.{name}.{dtype}", moments, EncodingOptions(codec().config())
    for dtype in SAFETENSORS_TAGS:
        yield f"type.{dtype}", {"param": drawn(dtype, 17, 100, scale=4.0)}, EncodingOptions()
    yield "odd.float32", {"param": odd("float32"), "exp_avg": odd("float32")}, EncodingOptions()
    yield "odd.bfloat16", {"param": odd("bfloat16")}, EncodingOptions()
    yield "run", {"param": sparse("int8", 600_001)}, EncodingOptions()
    yield "four.axes", {"param": drawn("float16", 8, 5, 3, 3)}, EncodingOptions()
    yield "scalar", {"param": drawn("float32")}, EncodingOptions()
    yield "empty", {"param": drawn("float32", 0, 3)}, EncodingOptions()
    noise = np.random.RandomState(9).randint(0, 256, 3000).astype(np.uint8)
    yield "noise", {"param": noise}, EncodingOptions()


def main() -> None:
    out = HERE / NAME
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    cases = {name: (states, encoding) for name, states, encoding in parameters()}
    tensors = {
        name: Parameter(
            name, "parameter", {from_stored(s): Tensor.of(ArrayBlob(a)) for s, a in states.items()}, {"step": 7}
        )
        for name, (states, _) in cases.items()
    }
    group = Group({"lr": 0.001, "betas": (0.9, 0.95)}, tuple(tensors))
    source = Checkpoint(
        path=out, origin=Origin("golden", "2", 7), parameters=tensors, groups=(group,), extras={"epoch": 3}
    )
    format = Universal(pack_nbytes=1)  # a pack for each parameter: each has an encoding of its own
    receipts = []
    for part in format.plan(source).files:
        (parameter,) = part.parameters
        assert isinstance(part.content, PackContent)
        content = replace(part.content, encoding=cases[parameter.name][1])
        with Reader() as reader:
            receipts.append(format.write(out, replace(part, content=content), Transfer(reader)))
    format.commit(out, source, receipts)
    expected = {
        f"{name}/{to_stored(state)}": [
            tensor.dtype.name,
            list(tensor.shape),
            xxhash.xxh3_128_hexdigest(read(tensor).tobytes()),
        ]
        for name, parameter in tensors.items()
        for state, tensor in parameter.states.items()
    }
    out.with_suffix(".expected.json").write_text(json.dumps(expected, indent=0) + "\n")
    print(f"{out}: {sum(p.stat().st_size for p in out.rglob('*') if p.is_file()):,} bytes")


if __name__ == "__main__":
    main()
