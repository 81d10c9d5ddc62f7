"""Tensors matched by one expression are what the interpreter reads opcode by opcode, and nothing else is let in."""

import random
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

from ckpt_formats.containers.torchfile import Storage, TensorRef, Window, tensor_calls
from ckpt_formats.containers.torchfile.pickle_reader import PAD, Interpreter
from ckpt_formats.containers.torchfile.reader import StorageTable
from ckpt_formats.containers.torchfile.zip_archive import Archive, read_directory
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.values import Record, StdDict

COUNT = 200
"""Tensors of the file: enough for indices of the memo beyond 256 and 512."""


def state() -> dict[str, Any]:
    shapes = [(), (3,), (4, 6), (2, 3, 4), (2, 1, 2, 3), (0, 5), (300, 2)]
    kinds = [torch.float32, torch.bfloat16, torch.int64]
    tensors = {f"layer.{i}": torch.arange(600, dtype=kinds[i % 3])[: prod(shapes[i % 7])] for i in range(COUNT)}
    return {name: tensor.clone().reshape(shapes[i % 7]) for i, (name, tensor) in enumerate(tensors.items())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Archive]:
    """The pickle of a file, and its archive."""
    path = tmp_path_factory.mktemp("saved") / "a.pt"
    torch.save(state(), path)
    with Window(path) as window:
        archive = read_directory(window)
        return archive.read("data.pkl", window, 1 << 20), archive


def dump(value: Any) -> Iterator[Any]:
    """All of a value, comparable: types, contents, the geometry of tensors and their storages."""
    pending, seen = [value], {}
    while pending:
        item = pending.pop()
        if id(item) in seen and isinstance(item, (dict, list, tuple, Record, TensorRef, Storage)):
            yield "again", seen[id(item)]
            continue
        seen[id(item)] = len(seen)
        yield type(item).__name__
        if isinstance(item, TensorRef):
            yield item.dtype, item.offset, item.shape, item.strides, item.requires_grad, item.is_parameter
            pending += [item.storage, item.attrs]
        elif isinstance(item, Storage):
            yield item.key, item.cls, item.numel, item.location
        elif isinstance(item, dict):
            pending += [part for pair in item.items() for part in pair]
            pending += [item.attrs] if isinstance(item, StdDict) else []
        elif isinstance(item, (list, tuple)):
            pending += item
        elif isinstance(item, Record):
            pending += [item.cls, item.args, item.kwargs, item.state, item.items, item.mapping]
        else:
            yield repr(item)


def outcome(data: bytes, archive: Archive, *, matched: bool = True) -> Any:
    """What the pickle of an archive is read as: a value and its storages, or an error."""
    table = StorageTable("a file", archive, archive)
    interpreter = Interpreter("a file", table.resolve)
    if not matched:
        interpreter._tensor_calls = None
    try:
        value, end = interpreter.load(data + PAD)
    except CkptError as error:
        return type(error), str(error)
    return list(dump(value)), end, list(table.storages)


def _changed(data: bytes, rng: random.Random) -> bytes:
    """The pickle with one to three bytes replaced, by any byte or by one from another place of it."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(data))] = rng.choice((rng.randrange(256), data[rng.randrange(len(data))]))
    return bytes(changed)


def test_tensor_calls_match_most_tensors(saved: tuple[bytes, Archive], monkeypatch: pytest.MonkeyPatch) -> None:
    matches = []
    match = tensor_calls.TensorCalls.match
    monkeypatch.setattr(tensor_calls.TensorCalls, "match", lambda *args: matches.append(match(*args)) or matches[-1])
    outcome(*saved)
    assert sum(one is not None for one in matches) > 0.7 * COUNT  # the first 30 have indices of one byte


@pytest.mark.parametrize("seed", range(2))
def test_a_changed_pickle_is_read_or_refused_as_without_matching(saved: tuple[bytes, Archive], seed: int) -> None:
    data, archive = saved
    rng = random.Random(seed)
    for _ in range(150):
        changed = _changed(data, rng)
        assert outcome(changed, archive) == outcome(changed, archive, matched=False)


def test_a_reference_to_a_part_of_a_tensor_is_read_without_matching(saved: tuple[bytes, Archive]) -> None:
    data, archive = saved
    at = next(at for at in range(len(data)) if tensor_calls._TENSOR(data, at))
    call = tensor_calls._TENSOR(data, at)
    first, high, key = call[5], call["high"], call[4].decode()
    value, _ = Interpreter("a file", StorageTable("a file", archive, archive).resolve).load(
        data[:-1] + b"j" + first + high + b"\x86." + PAD
    )
    assert list(value[0]) == list(state())
    assert value[1] == key
