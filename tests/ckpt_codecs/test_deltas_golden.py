"""Chunks of deltas that were written once are read for ever, and written the same, at every CPU level.

`golden_deltas/make.py` wrote them; no test does.
"""

from pathlib import Path

import pytest

from ckpt_codecs.deltas.chunk_parts import split_parts
from ckpt_codecs.deltas.format_ids import CHANGED_ROWS
from cpu_levels import LEVELS, at_level
from delta_golden import GOLDEN, golden

PATHS = sorted(GOLDEN.glob("*.npz"))


def test_each_codec_and_each_kind_and_form_has_golden_chunks() -> None:
    assert {path.stem.partition("-")[0] for path in PATHS} == {"difference", "replay", "rows"}
    kinds, forms = set(), set()
    for path in PATHS:
        _, change, chunk = golden(path)
        dtypes = {name: values.dtype for name, values in change.after.items()}
        if chunk[0] == CHANGED_ROWS:
            continue
        for part in split_parts(chunk, dtypes).values():
            kinds.add(part[0])
            forms |= {part[1]} if part[0] in (1, 2, 4, 5, 7) else set()
    assert kinds == set(range(8))
    assert forms >= {0, 1, 4, 16, 17, 18, 19}


EACH = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
EACH_LEVEL = pytest.mark.parametrize("level", LEVELS)


@EACH_LEVEL
@EACH
def test_delta_codec_reads_its_golden_chunk(path: Path, level: int) -> None:
    codec, change, chunk = golden(path)
    shape = next(iter(change.after.values())).shape
    with at_level(level):
        decoded = codec.decode(chunk, change.before, shape, {state: v.dtype for state, v in change.after.items()})
    assert {state: values.tobytes() for state, values in decoded.items()} == {
        state: values.tobytes() for state, values in change.after.items()
    }


@EACH_LEVEL
@EACH
def test_delta_codec_writes_its_golden_chunk(path: Path, level: int) -> None:
    codec, change, chunk = golden(path)
    with at_level(level):
        assert bytes(codec.encode(change)) == chunk
