"""Golden chunks of deltas, as `golden_deltas/make.py` wrote them."""

import json
from pathlib import Path

import numpy as np

from ckpt_codecs import DeltaCodec
from ckpt_codecs.delta import StatePair
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array

GOLDEN = Path(__file__).parent / "golden_deltas"


def golden(path: Path) -> tuple[DeltaCodec, StatePair, dict[str, bytes]]:
    """The codec, what it was given, and what it wrote: what writes now is `kernels`; NumPy wrote `portable` once."""
    with np.load(path) as held:
        about = json.loads(str(held["about"]))

        def states(side: str) -> dict[str, Array]:
            types = {state: DTYPES[dtype] for state, dtype in about[side].items()}
            return {
                state: held[f"{side}-{state}"].view(dtype).reshape(about["shape"]) for state, dtype in types.items()
            }

        written = {engine: held[engine].tobytes() for engine in ("kernels", "portable") if engine in held}
        return delta_from_config(about["codec"]), StatePair(states("before"), states("after")), written
