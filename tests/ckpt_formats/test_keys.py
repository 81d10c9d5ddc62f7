"""Keys that files state are looked up quickly, although their hashes are no secret."""

import pickle
import time
from pathlib import Path

import pytest

from ckpt_formats.containers.keys import KeyHashes
from ckpt_formats.containers.torchfile.builders import hashable
from ckpt_formats.containers.torchfile.pickle_reader import PAD, Interpreter
from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError
from ckpt_formats.core.values import Global, Record

COUNT = 20_000
EQUAL = [complex(-1000003.0 * i, i) for i in range(COUNT)]
"""All of one hash: a dict of them takes minutes."""
HERE = Path("file")


def _json(keys: list[complex]) -> list[dict[str, list[float]]]:
    return [{"$complex": [key.real, key.imag]} for key in keys]


def _tables() -> dict[str, object]:
    keys = _json(EQUAL)
    return {
        "dict": {"$dict": [[key, 1] for key in keys]},
        "set": {"$set": keys},
        "frozenset": {"$frozenset": keys},
        "std": {"$std": {"class": ["collections", "OrderedDict"], "items": [[key, 1] for key in keys]}},
        "tuples": {"$set": [{"$tuple": [1, key]} for key in keys]},
    }


@pytest.mark.parametrize("kind", ["dict", "set", "frozenset", "std", "tuples"])
@pytest.mark.timeout(60)
def test_keys_of_one_hash_are_refused_in_typed_json(kind: str) -> None:
    assert len({hash(key) for key in EQUAL}) == 1
    content = _tables()[kind]
    start = time.process_time()
    with pytest.raises(UnsafeError, match="same hash") as caught:
        decode(content, HERE)
    assert caught.value.where == str(HERE)
    assert time.process_time() - start < 5


def _pickled(opcode: bytes, keys: list[complex]) -> bytes:
    """A pickle that puts keys into one dict, or one set, in many steps."""
    empty, end = (b"}", b"s") if opcode == b"s" else (b"\x8f", b"\x90")
    parts = []
    for key in keys:
        pickled = pickle.dumps(key, 2)[2:-1]
        parts.append(pickled + b"K\1s" if end == b"s" else b"(" + pickled + end)
    return b"\x80\4" + empty + b"".join(parts) + b"."


@pytest.mark.parametrize("opcode", [b"s", b"\x90"])
@pytest.mark.timeout(60)
def test_keys_of_one_hash_are_refused_in_pickles_of_many_steps(opcode: bytes) -> None:
    start = time.process_time()
    with pytest.raises(CkptError, match="same hash"):
        Interpreter("file").load(_pickled(opcode, EQUAL[:2000]) + PAD)
    assert time.process_time() - start < 5
    value, _ = Interpreter("file").load(_pickled(opcode, EQUAL[:60]) + PAD)
    assert len(value) == 60


def test_pickle_takes_many_different_keys() -> None:
    content = {"$dict": [[{"$tuple": [i, i + 1]}, i] for i in range(5000)] + [[i, i] for i in range(5000)]}
    assert len(decode(content, HERE)) == 10_000


@pytest.mark.parametrize(
    "content",
    [
        {"$array": {"dtype": ",", "data": "", "shape": [0]}},
        {"$array": {"dtype": "i4,i4", "data": "", "shape": [0]}},
        {"$array": {"dtype": "(2,)i4", "data": "", "shape": [0]}},
        {"$array": {"dtype": "<U1", "data": "////fw=="}},
        {"$array": {"dtype": "<U1", "data": "////fw==", "shape": [1]}},
        {"$array": {"dtype": "V99999999999", "data": "", "shape": [0]}},
        {"$array": {"dtype": "<f4", "data": "", "shape": [0, 1 << 62]}},
        {"$array": {"dtype": "<f4", "data": "", "shape": [0, -1]}},
        {"$array": {"dtype": "<f4", "data": "", "shape": [0] * 70}},
        {"$complex": [{"$int": "0x" + "f" * 400}, 0]},
        {"$complex": [10**400, 0]},
        {"$int": "f" * (2 << 20)},
        {"$size": [1e400]},
        {"$size": [float("nan")]},
        {"$set": [[1]]},
    ],
)
def test_typed_json_of_impossible_values_is_corrupt(content: object) -> None:
    with pytest.raises(CorruptError, match="not a typed value"):
        decode(content, HERE)


def test_hashable_counts_hashes_only_of_keys_that_have_them() -> None:
    assert hashable(5, "here") == 5
    record, hashes = Record(Global("a", "b")), KeyHashes()
    for _ in range(1000):
        assert hashable(record, "here", hashes) is record
