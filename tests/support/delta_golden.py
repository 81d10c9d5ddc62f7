"""Golden chunks of deltas, as `golden_deltas/make.py` wrote them."""

import json
from pathlib import Path

import numpy as np

from ckpt_codecs import DeltaCodec
from ckpt_codecs.delta import StatePair
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array

GOLDEN = Path(__file__).parents[1] / "golden_deltas"


def golden(path: Path) -> tuple[DeltaCodec, StatePair, bytes]:
    """Return the codec, what it encoded, and the chunk that it wrote."""
    with np.load(path) as content:
        about = json.loads(str(content["about"]))

        def states(side: str) -> dict[str, Array]:
            types = {state: DTYPES[dtype] for state, dtype in about[side].items()}
            return {
                state: content[f"{side}-{state}"].view(dtype).reshape(about["shape"]) for state, dtype in types.items()
            }

        change = StatePair(states("before"), states("after"))
        return delta_from_config(about["codec"]), change, content["chunk"].tobytes()
