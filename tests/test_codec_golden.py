"""Chunks that were written once are read for ever, by either engine.

`golden_codecs/make.py` wrote them; no test does.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ckpt_codecs import CODECS, Rounded, from_config
from ckpt_codecs.engine import using
from ckpt_formats.dtypes import DTYPES
from test_codecs import BOTH

GOLDEN = sorted((Path(__file__).parent / "golden_codecs").glob("*.npz"))


def test_every_codec_and_every_mode_has_golden_chunks() -> None:
    codecs, modes = set(), set()
    for path in GOLDEN:
        with np.load(path) as golden:
            codecs.add(json.loads(str(golden["about"]))["codec"]["name"])
            modes |= {int(golden["kernels"][0]), int(golden["portable"][0])}
    assert codecs == set(CODECS) - {Rounded.name}
    assert modes == set(range(8))


@BOTH
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_chunk_is_read_as_ever(path: Path, name: str) -> None:
    with np.load(path) as golden:
        about = json.loads(str(golden["about"]))
        written, values = [golden[engine].tobytes() for engine in ("kernels", "portable")], golden["values"].tobytes()
        shape, dtype = tuple(about["shape"]), DTYPES[about["dtype"]]
        base = golden["base"].view(DTYPES[about["base"]]).reshape(shape) if about["base"] else None
    codec = from_config(about["codec"])
    with using(name):
        for chunk in written:
            assert codec.decode(chunk, shape, dtype, base).tobytes() == values
