"""Random values of the whole language of extras."""

import json
import math
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value
from held import array

HALVES = "\ud83d\ude00"
"""A character in two halves, of which JSON makes one."""

any_text = st.text(st.characters(categories=["L", "N", "P", "Cc", "Cs", "So"]), max_size=8).filter(
    lambda text: json.loads(json.dumps(text)) == text
)
texts = st.one_of(any_text, st.sampled_from(["", "$", "$dict", "$tuple", "$int", "\ud800", "\udc80x", "\0", "é", "😀"]))
floats = st.one_of(st.floats(), st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0]))
globals_ = st.builds(Global, texts, texts)
CODES = ["?", "u1", "i2", "<i4", ">i4", "<f2", ">f4", "<f8", "<c8", "c16", "<U3", "S4", "<M8[s]", "<m8[ns]", "V3"]
SHORT = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@st.composite
def numpy_values(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        numbers = array(DTYPES[draw(st.sampled_from(SHORT))], draw(st.sampled_from([(), (0,), (3,), (2, 2)])))
    else:
        dtype = np.dtype(draw(st.sampled_from(CODES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
        size = math.prod(shape) * dtype.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        if dtype.kind == "U":
            raw = np.array(["ab", "é", "x"] * (size // 12 + 1), dtype).tobytes()[:size]
        if dtype.kind == "?":
            raw = bytes(b & 1 for b in raw)
        numbers = np.frombuffer(raw, dtype).reshape(shape) if size else np.zeros(shape, dtype)
    return numbers[()] if numbers.shape == () and draw(st.booleans()) else numbers


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    floats,
    st.complex_numbers(),
    texts,
    st.binary(max_size=9),
    st.binary(max_size=9).map(bytearray),
    globals_,
    st.builds(TensorName, texts),
    st.lists(st.integers(0, 2**62), max_size=3).map(Size),
    numpy_values(),
)

hashable = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), floats, texts, st.binary(max_size=5), globals_),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=5,
)


def std_dict(cls: Global, factory: Global | None, items: list[tuple[Value, Value]], attrs: dict[str, Value]) -> StdDict:
    result = StdDict(cls, factory)
    result.update(items)
    result.attrs = attrs
    return result


def containers(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    several = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(hashable, inner), max_size=3)
    named = st.dictionaries(texts, inner, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        named,
        st.dictionaries(hashable, inner, max_size=3),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
        st.builds(std_dict, globals_, st.none() | globals_, pairs, named),
        st.builds(Record, globals_, several.map(tuple), named, inner, several, pairs, st.booleans()),
    )


values = st.recursive(leaves, containers, max_leaves=12)
