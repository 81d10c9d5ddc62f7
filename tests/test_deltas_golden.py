"""Chunks of deltas that were written once are read for ever, by either engine.

`golden_deltas/make.py` wrote them; no test does.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ckpt_codecs.delta import Form
from ckpt_codecs.deltas.parts import cut
from ckpt_codecs.engine import using
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.dtypes import DTYPES
from ckpt_formats.tensor import Array
from test_codecs import BOTH

GOLDEN = sorted((Path(__file__).parent / "golden_deltas").glob("*.npz"))


def test_each_codec_and_each_kind_and_form_has_golden_chunks() -> None:
    assert {path.stem.partition("-")[0] for path in GOLDEN} == {"difference", "replay"}
    kinds, forms = set(), set()
    for path in GOLDEN:
        with np.load(path) as golden:
            about = json.loads(str(golden["about"]))
            for part in cut(golden["kernels"].tobytes(), about["after"]).values():
                kinds.add(part[0])
                forms |= {part[1]} if part[0] in (1, 2, 4, 5, 7) else set()
    assert kinds == set(range(8))
    assert forms >= {0, 1, 4, 16, 17, 18}


@BOTH
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_chunk_is_read_as_ever(path: Path, name: str) -> None:
    with np.load(path) as golden:
        about = json.loads(str(golden["about"]))
        shape: tuple[int, ...] = tuple(about["shape"])

        def states(side: str) -> dict[str, Array]:
            types: Form = {state: DTYPES[dtype] for state, dtype in about[side].items()}
            return {state: golden[f"{side}-{state}"].view(dtype).reshape(shape) for state, dtype in types.items()}

        written = [golden[engine].tobytes() for engine in ("kernels", "portable")]
        before, after = states("before"), states("after")
    codec = delta_from_config(about["codec"])
    with using(name):
        for chunk in written:
            made = codec.decode(chunk, before, shape, {state: values.dtype for state, values in after.items()})
            assert {state: values.tobytes() for state, values in made.items()} == {
                state: values.tobytes() for state, values in after.items()
            }
