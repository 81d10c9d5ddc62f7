"""Typed JSON loses nothing, and neither a hostile value nor a hostile text gets past it."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.values import Global, Record, TensorName, Value
from held import array, plain
from typed_values import HALVES, values

HERE = Path("manifest.json")


def through_text(value: Value) -> Value:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)), HERE)


@given(values)
@example({"$tuple": 1})
@example({"$": {"$": {}}})
@example([{}, {"": {}}, {"a": {"$b": 1}}])
@example(-0.0)
@example(2**64)
@example(10**6000)
@example(-(10**6000))
@example(np.str_("a"))
@example(np.str_(""))
@example(np.bytes_(b""))
@example(np.zeros((2, 0, 3), "f4"))
@example(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
@example(np.arange(6)[::2])
@example(Record(Global("a", "B"), state=False))
@example({True: 1, "True": 2})
@example({1.5: "a", "1.5": "b", None: "c", (): "d"})
def test_every_value_comes_back_with_its_type_and_bits(value: Value) -> None:
    assert plain(through_text(value)) == plain(value)


@given(values)
def test_equal_values_are_equal_text(value: Value) -> None:
    """The content id rests on it: sets have no order."""
    text = json.dumps(encode(value), sort_keys=True)
    assert json.dumps(encode(through_text(value)), sort_keys=True) == text


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_numpy_arrays_and_scalars_of_every_type_come_back(dtype: np.dtype) -> None:
    for shape in [(), (3,), (2, 0), (2, 2)]:
        numbers = array(dtype, shape)
        assert plain(through_text(numbers)) == plain(numbers)
    scalar = array(dtype, (1,))[0]
    assert plain(through_text(scalar)) == plain(scalar)


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array([(1, 2)], "i4,i4"), object(), len, 1j.__class__, range(3)],
    ids=lambda value: str(type(value)),
)
def test_encode_refuses_values_without_a_form(value: Any) -> None:
    with pytest.raises(UnsupportedError):
        encode({"a": [value]})


@pytest.mark.parametrize(
    "value",
    [
        HALVES,
        {HALVES: 1, "😀": 2},
        Global(HALVES, "x"),
        TensorName(HALVES),
        Record(Global("a", "b"), kwargs={HALVES: 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_text_that_json_would_change_is_refused_when_written(value: Value) -> None:
    with pytest.raises(UnsupportedError, match="two surrogates"):
        encode([value])


def cyclic_list() -> Value:
    value: list[Value] = []
    value.append(value)
    return value


def cyclic_record() -> Value:
    value = Record(Global("a", "B"))
    value.state = {"self": value}
    return value


def laughs(levels: int = 60, width: int = 2) -> Value:
    value: Value = ["ha"]
    for _ in range(levels):
        value = [value] * width
    return value


ABSURD = {
    "a list in itself": cyclic_list,
    "a record in itself": cyclic_record,
    "a billion laughs": laughs,
    "laughs of tuples in dicts": lambda: {"a": tuple(laughs(40, 3))},
    "wide laughs": lambda: laughs(6, 100),
    "one large text very often": lambda: ["x" * 1_000_000] * 100_000,
    "large bytes very often": lambda: [b"x" * 1_000_000] * 100_000,
    "a large array very often": lambda: [np.zeros(1_000_000, np.uint8)] * 100_000,
    "a large text as a key": lambda: [{"x" * 1_000_000: 1}] * 100_000,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ABSURD)
@pytest.mark.slow
def test_values_without_end_are_refused_quickly(kind: str) -> None:
    with pytest.raises(UnsafeError):
        encode(ABSURD[kind]())


@pytest.mark.slow
def test_large_honest_values_pass() -> None:
    """A sampler's order of a million samples, a hundred thousand options, a vocabulary."""
    assert through_text(list(range(1_000_000)))[-1] == 999_999
    shared = {"lr": 0.1, "betas": (0.9, 0.95)}
    assert through_text([shared] * 100_000)[99_999] == shared
    assert len(through_text({f"token {i}": i for i in range(300_000)})) == 300_000


HOSTILE: list[Any] = [
    {"$unknown": 1},
    {"$int": "x"},
    {"$int": None},
    {"$int": [1]},
    {"$float": "zz"},
    {"$float": "00"},
    {"$float": 1},
    {"$complex": [1]},
    {"$complex": "ab"},
    {"$complex": [{}, []]},
    {"$bytes": "*"},
    {"$bytes": 5},
    {"$bytearray": "a"},
    {"$tuple": 5},
    {"$set": [[1]]},
    {"$set": [{}]},
    {"$frozenset": [[]]},
    {"$size": ["a"]},
    {"$size": {"a": 1}},
    {"$size": [None]},
    {"$dict": [[1]]},
    {"$dict": [[[], 1]]},
    {"$dict": 7},
    {"$std": {}},
    {"$std": []},
    {"$std": {"class": ["a"], "items": []}},
    {"$std": {"class": ["a", 1], "items": []}},
    {"$std": {"class": ["a", "b"], "items": [[1]]}},
    {"$std": {"class": ["a", "b"], "items": 3}},
    {"$std": {"class": ["a", "b"], "items": [], "attrs": [1]}},
    {"$std": {"class": ["a", "b"], "items": [], "factory": 1}},
    {"$object": {}},
    {"$object": {"class": 1}},
    {"$object": {"class": ["a", "b", "c"]}},
    {"$object": {"class": ["a", "b"], "args": 1}},
    {"$object": {"class": ["a", "b"], "kwargs": []}},
    {"$object": {"class": ["a", "b"], "mapping": [1]}},
    {"$object": {"class": ["a", "b"], "items": 1}},
    {"$global": "ab"},
    {"$global": ["a", 1]},
    {"$global": [None, None]},
    {"$tensor": 1},
    {"$tensor": ["a"]},
    {"$array": {}},
    {"$array": 1},
    {"$array": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
    {"$array": {"dtype": "f4", "shape": [2**62], "data": ""}},
    {"$array": {"dtype": "f4", "shape": [-1], "data": "AAAAAA=="}},
    {"$array": {"dtype": "f4", "shape": [-1, -1], "data": "AAAAAA=="}},
    {"$array": {"dtype": "f4", "shape": [1.0], "data": "AAAAAA=="}},
    {"$array": {"dtype": "f4", "shape": "1", "data": "AAAAAA=="}},
    {"$array": {"dtype": "f4,f4", "shape": [1], "data": "AAAAAAAAAAA="}},
    {"$array": {"dtype": "(1000000000,)f4", "shape": [0], "data": ""}},
    {"$array": {"dtype": None, "shape": [0], "data": ""}},
    {"$array": {"dtype": {"names": ["a"], "formats": ["O"]}, "shape": [0], "data": ""}},
    {"$array": {"dtype": "U0", "shape": [10**12], "data": ""}},
    {"$array": {"dtype": "S", "shape": [2**70], "data": ""}},
    {"$array": {"dtype": "f4", "shape": [0, 2**70], "data": ""}},
    {"$array": {"dtype": "f4", "shape": [0] * 100, "data": ""}},
    {"$array": {"dtype": "nonsense", "shape": [0], "data": ""}},
    {"$array": {"dtype": "f4", "shape": [1], "data": 4}},
    {"$array": {"dtype": "int4", "shape": [1], "data": "AA=="}},
]


@pytest.mark.parametrize("entry", HOSTILE, ids=str)
@pytest.mark.parametrize("wrap", [lambda entry: entry, lambda entry: {"a": [entry]}, lambda entry: {"$tuple": [entry]}])
def test_decode_refuses_what_encode_never_wrote(entry: Any, wrap: Any) -> None:
    with pytest.raises(CorruptError):
        decode(wrap(entry), HERE)


@pytest.mark.parametrize("depth", [200, 450, 599, 900, 5000])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: {"a": inner},
        lambda inner: {"$tuple": [inner]},
        lambda inner: {"$set": [inner]},
        lambda inner: {"$dict": [[1, inner]]},
        lambda inner: {"$object": {"class": ["a", "b"], "state": inner}},
        lambda inner: {"$std": {"class": ["a", "b"], "items": [[inner, 1]]}},
        lambda inner: {"$complex": [inner, 1]},
    ],
)
def test_nesting_without_end_is_corrupt(depth: int, wrap: Any) -> None:
    entry: Any = {"$tuple": []}
    for _ in range(depth):
        entry = wrap(entry)
    with pytest.raises(CorruptError):
        decode(entry, HERE)


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.floats(allow_nan=False),
        st.sampled_from(["", "a", "f4", "AAAA"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "a",
                    "$int",
                    "$float",
                    "$complex",
                    "$bytes",
                    "$bytearray",
                    "$size",
                    "$std",
                    "$tuple",
                    "$dict",
                    "$set",
                    "$frozenset",
                    "$tensor",
                    "$global",
                    "$object",
                    "$array",
                    "$x",
                    "class",
                    "items",
                    "state",
                    "dtype",
                    "shape",
                    "data",
                    "args",
                    "kwargs",
                    "mapping",
                    "new",
                    "attrs",
                    "factory",
                ]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_value_or_corrupt(entry: Any) -> None:
    try:
        value = decode(entry, HERE)
    except CorruptError:
        return
    with suppress(UnsafeError, UnsupportedError):
        assert plain(through_text(value)) == plain(value)
