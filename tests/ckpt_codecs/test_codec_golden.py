"""Chunks that were written once are read for ever, and written again today, at every level of CPU.

`golden_codecs/make.py` wrote them; no test does.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ckpt_codecs import CODECS, Codec, Rounded, from_config
from ckpt_codecs.format_ids import MAGNITUDES
from ckpt_codecs.gradients import GRADIENT_CODECS
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level

GOLDEN = sorted((Path(__file__).parents[1] / "golden_codecs").glob("*.npz"))
EACH = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
GRADIENTS = {codec.name: codec for codec in GRADIENT_CODECS.values()}
AT_EACH_LEVEL = pytest.mark.parametrize("level", LEVELS)


def open_golden(path: Path) -> tuple[Codec, Array, Array | None, bytes]:
    """Return the codec, the values, their base, and the chunk."""
    with np.load(path) as golden:
        about = json.loads(str(golden["about"]))
        shape = tuple(about["shape"])
        values = golden["values"].view(DTYPES[about["dtype"]]).reshape(shape)
        base = golden["base"].view(DTYPES[about["base"]]).reshape(shape) if about["base"] else None
        config: dict[str, str] = about["codec"]
        gradients = GRADIENTS.get(config["name"])
        codec = from_config(config) if gradients is None else gradients(config["level"])
        return codec, values, base, golden["chunk"].tobytes()


def test_every_codec_and_every_mode_has_golden_chunks() -> None:
    codecs, modes = set(), set()
    for path in GOLDEN:
        codec, _, _, chunk = open_golden(path)
        codecs.add(codec.name)
        modes.add(chunk[0])
    assert codecs == (set(CODECS) | set(GRADIENTS)) - {Rounded.name}
    assert modes == set(range(13)) - {MAGNITUDES}  # only large chunks have it; test_gradient_codecs.py has one by hand


@AT_EACH_LEVEL
@EACH
def test_codec_reads_its_golden_chunk(path: Path, level: int) -> None:
    codec, values, base, chunk = open_golden(path)
    with at_level(level):
        assert codec.decode(chunk, values.shape, values.dtype, base).tobytes() == values.tobytes()


@AT_EACH_LEVEL
@EACH
def test_codec_writes_its_golden_chunk(path: Path, level: int) -> None:
    codec, values, base, chunk = open_golden(path)
    with at_level(level):
        assert bytes(codec.encode(values, base)) == chunk
