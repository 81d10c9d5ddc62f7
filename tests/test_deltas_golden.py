"""Chunks of deltas that were written once are read for ever, by either engine.

`golden_deltas/make.py` wrote them; no test does.
"""

from pathlib import Path

import pytest

from ckpt_codecs.deltas.parts import cut
from ckpt_codecs.engine import using
from delta_golden import GOLDEN, golden
from test_codecs import BOTH

PATHS = sorted(GOLDEN.glob("*.npz"))


def test_each_codec_and_each_kind_and_form_has_golden_chunks() -> None:
    assert {path.stem.partition("-")[0] for path in PATHS} == {"difference", "replay"}
    kinds, forms = set(), set()
    for path in PATHS:
        _, change, written = golden(path)
        for part in cut(written["kernels"], {name: values.dtype for name, values in change.after.items()}).values():
            kinds.add(part[0])
            forms |= {part[1]} if part[0] in (1, 2, 4, 5, 7) else set()
    assert kinds == set(range(8))
    assert forms >= {0, 1, 4, 16, 17, 18, 19, 20}


@BOTH
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_golden_chunk_is_read_as_ever(path: Path, name: str) -> None:
    codec, change, written = golden(path)
    shape = next(iter(change.after.values())).shape
    with using(name):
        for chunk in written.values():
            made = codec.decode(chunk, change.before, shape, {state: v.dtype for state, v in change.after.items()})
            assert {state: values.tobytes() for state, values in made.items()} == {
                state: values.tobytes() for state, values in change.after.items()
            }
