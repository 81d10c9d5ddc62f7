"""Golden arrays of quantised weights: parts as libraries store them, and the digest of the values that they compute.

tests/campaigns/quantised_libraries.py compares and writes them.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_codecs.quantised import fp4, gguf_blocks, integers, scaled
from ckpt_codecs.quantised.base import Quantisation

Array = np.ndarray[Any, Any]
GOLDEN = sorted((Path(__file__).parents[1] / "golden_quantised").glob("*.z"))
CLASSES = {
    one.__name__: one
    for one in (
        *(scaled.ScaledCodes, fp4.Mxfp4, fp4.Nvfp4, fp4.LookupTable, gguf_blocks.GgufBlocks),
        *(integers.PackedIntegers, integers.Gptq, integers.Awq, integers.Hqq),
    )
}


def numpy_type(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def read_golden(path: Path) -> tuple[Quantisation, list[Array], str]:
    head, _, data = zlib.decompress(path.read_bytes()).partition(b"\n")
    stated, parts, at = json.loads(head), [], 0
    for name, shape in stated["parts"]:
        dtype = numpy_type(name)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        parts.append(np.frombuffer(data[at : at + nbytes], dtype).reshape(shape))
        at += nbytes
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in stated["fields"].items()}
    return CLASSES[stated["class"]](**fields), parts, stated["values"]
