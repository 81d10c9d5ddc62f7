"""Golden chunks of lossy codecs decode to the same bits, and their states encode to known bytes, at each level of CPU.

`golden_lossy/make.py` wrote them, with version 1 of the format; no test does. What the encoder writes may change with
a version, so its bytes are kept beside the states, and may be others than those of the golden chunk.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ckpt_codecs.delta import StatePair, StateTypes
from ckpt_codecs.lossy import state_types as forms
from ckpt_codecs.lossy.byte_reader import ByteReader
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level

GOLDEN = sorted((Path(__file__).parents[1] / "golden_lossy").glob("*.npz"))


def test_each_kind_of_section_has_a_golden_chunk() -> None:
    kinds, firsts, flags = set(), set(), 0
    for path in GOLDEN:
        with np.load(path) as golden:
            about, source = json.loads(str(golden["about"])), ByteReader(golden["data"].tobytes())
        if about["codec"]["name"] == "subspace":
            for name in forms.in_order({name: DTYPES[dtype] for name, dtype in about["decoded"].items()}):
                (kind,), content = source.take(1), source.part()
                kinds.add(kind)
                flags |= content[0] if kind in (2, 5) else 0
                firsts |= {content[0]} if kind == 4 and name in forms.FIRST_MOMENTS else set()
    assert kinds == set(range(6))
    assert firsts == set(range(4))
    assert flags == 15


def states_of(
    golden: Mapping[str, Array], side: str, dtypes: Mapping[str, str], shape: tuple[int, ...]
) -> dict[str, Array]:
    return {
        state: np.ascontiguousarray(golden[f"{side}-{state}"]).view(DTYPES[dtype]).reshape(shape)
        for state, dtype in dtypes.items()
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_lossy_codec_reads_its_golden_chunk(path: Path, level: int) -> None:
    with np.load(path) as golden:
        about = json.loads(str(golden["about"]))
        shape: tuple[int, ...] = tuple(about["shape"])
        form: StateTypes = {state: DTYPES[dtype] for state, dtype in about["decoded"].items()}
        before = states_of(golden, "before", about["before"], shape)
        data = golden["data"].tobytes()
        expected = {state: golden[f"decoded-{state}"].tobytes() for state in form}
    with at_level(level):
        decoded = delta_from_config(about["codec"]).decode(data, before, shape, form)
    assert {state: values.tobytes() for state, values in decoded.items()} == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_lossy_codec_writes_its_golden_chunk(path: Path, level: int) -> None:
    with np.load(path) as golden, np.load(path.parent / "after" / path.name) as encoded:
        about = json.loads(str(golden["about"]))
        shape: tuple[int, ...] = tuple(about["shape"])
        before, data = states_of(golden, "before", about["before"], shape), encoded["data"].tobytes()
        after = states_of(encoded, "after", about["decoded"], shape)
    with at_level(level):
        assert delta_from_config(about["codec"]).encode(StatePair(before, after)) == data
