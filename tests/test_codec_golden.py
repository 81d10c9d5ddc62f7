"""Chunks that were written once are read for ever, and written again today, at every level of CPU.

`golden_codecs/make.py` wrote them; no test does. Those that it called `portable` are of an older version, which wrote
frames of zstd where Huffman codes are now.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from ckpt_codecs import CODECS, Codec, Rounded, from_config
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level

GOLDEN = sorted((Path(__file__).parent / "golden_codecs").glob("*.npz"))
WRITTEN_OTHERWISE = {
    "first-moment": 0x409219CF,
    "first-moment-bfloat16": 0x08E66D2E,
    "first-moment-flat": 0x239570A7,
    "second-moment": 0x06FAD6B7,
}
"""The CRC-32 of what is written today where that is not the golden chunk: an older encoder packed planes of 8 to 31
bytes to seven bits, here those of the scales of rows."""
EACH = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
AT_EACH_LEVEL = pytest.mark.parametrize("level", LEVELS)


def open_golden(path: Path) -> tuple[Codec, Array, Array | None, dict[str, bytes]]:
    """The codec, the values, their base, and the chunks by what wrote them."""
    with np.load(path) as golden:
        about = json.loads(str(golden["about"]))
        chunks = {name: golden[name].tobytes() for name in ("kernels", "portable")}
        shape = tuple(about["shape"])
        values = golden["values"].view(DTYPES[about["dtype"]]).reshape(shape)
        base = golden["base"].view(DTYPES[about["base"]]).reshape(shape) if about["base"] else None
    return from_config(about["codec"]), values, base, chunks


def test_every_codec_and_every_mode_has_golden_chunks() -> None:
    codecs, modes = set(), set()
    for path in GOLDEN:
        codec, _, _, chunks = open_golden(path)
        codecs.add(codec.name)
        modes |= {chunk[0] for chunk in chunks.values()}
    assert codecs == set(CODECS) - {Rounded.name}
    assert modes == set(range(8))


@AT_EACH_LEVEL
@EACH
def test_a_golden_chunk_is_read_as_ever(path: Path, level: int) -> None:
    codec, values, base, chunks = open_golden(path)
    with at_level(level):
        for chunk in chunks.values():
            assert codec.decode(chunk, values.shape, values.dtype, base).tobytes() == values.tobytes()


@AT_EACH_LEVEL
@EACH
def test_a_golden_chunk_is_written_again(path: Path, level: int) -> None:
    codec, values, base, chunks = open_golden(path)
    with at_level(level):
        chunk = bytes(codec.encode(values, base))
    if path.stem in WRITTEN_OTHERWISE:
        assert chunk != chunks["kernels"]
        assert zlib.crc32(chunk) == WRITTEN_OTHERWISE[path.stem]
    else:
        assert chunk == chunks["kernels"]
