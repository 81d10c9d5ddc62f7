"""What opening a checkpoint costs for each tensor, counted in calls; and that objects matched whole hide nothing."""

import gc
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_formats.containers.torchfile import CompactRecord, load_pickle
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.gc_pause import gc_paused
from ckpt_formats.engines.dcp.metadata import FORMS, MetadataReader
from ckpt_formats.registry.opening import open_checkpoint
from collector import thawed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SHAPES = ((4, 3), (6,), (2, 5))
STATES = ("step", "exp_avg", "exp_avg_sq")
MAX_CALLS = {"torch": 110, "safetensors": 85, "dcp": 160}
"""Calls of functions, Python's own among them, for each tensor that a file has more."""


def write(folder: Path, kind: str, count: int) -> tuple[Path, int]:
    """A checkpoint of `count` parameters with the states of AdamW; its number of tensors."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    parameters = [torch.nn.Parameter(torch.randn(SHAPES[i % 3])) for i in range(count)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model, state = {name: p.detach() for name, p in zip(names, parameters, strict=True)}, optimizer.state_dict()
    by_name = {name: state["state"][i] for i, name in enumerate(names)}
    path = folder / f"{kind}-{count}"
    if kind == "torch":
        path = path.with_suffix(".pt")
        torch.save({"model": model, "optimizer": state}, path)
    elif kind == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file({**model, **{f"{name}/{key}": by_name[name][key] for name in names for key in STATES}}, path)
    else:
        optim = {"state": by_name, "param_groups": [{"lr": 1e-3, "params": names}]}
        checkpoint.save({"model": model, "optim": optim}, checkpoint_id=path, no_dist=True)
    return path, count * (1 + len(STATES))


def calls(work: Callable[[], Any]) -> int:
    """The calls of functions that `work` makes."""
    count = 0

    def counts(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counts)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", MAX_CALLS)
def test_a_tensor_takes_few_calls_to_open(kind: str, tmp_path: Path) -> None:
    (few, few_tensors), (many, many_tensors) = (write(tmp_path, kind, count) for count in (100, 400))
    open_checkpoint(few)  # imports, and caches
    counted = [calls(lambda path=path: open_checkpoint(path)) for path in (few, many)]
    each = (counted[1] - counted[0]) / (many_tensors - few_tensors)
    assert each <= MAX_CALLS[kind]


def metadata() -> Metadata:
    """Tensors in one block each, many of them alike, and one in two blocks."""
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for i in range(24):
        shape = torch.Size(SHAPES[i % 3])
        kind = TensorProperties((torch.float32, torch.bfloat16)[i % 2])
        origin = torch.Size((0,) * len(shape))
        tensors[f"layer.{i}"] = TensorStorageMetadata(
            kind, shape, [ChunkStorageMetadata(origin, torch.Size(SHAPES[i % 3]))]
        )
        places[MetadataIndex(f"layer.{i}", origin, 0)] = _StorageInfo("__0_0.distcp", 1000 * i, 1000)
    halves = [ChunkStorageMetadata(torch.Size((at,)), torch.Size((2,))) for at in (0, 2)]
    tensors["cut"] = TensorStorageMetadata(TensorProperties(), torch.Size((4,)), halves)
    for at in (0, 2):
        places[MetadataIndex("cut", torch.Size((at,)))] = _StorageInfo(f"__{at}_0.distcp", 0, 1000)
    return Metadata(tensors, {name: tuple(name.split(".")) for name in tensors}, places, StorageMeta(), "1.0.0")


def outcome(data: bytes, forms: Any) -> Any:
    try:
        read = MetadataReader(Path("a file")).metadata(load_pickle(data, "a file", forms))
        return read.tensors, read.objects, read.paths, read.files, list(read.items), read.notices, read.nesting
    except CkptError as error:
        return type(error), str(error)


def test_tensors_that_are_alike_become_one_object() -> None:
    entries = load_pickle(pickle.dumps(metadata(), 4), "x", FORMS).state["state_dict_metadata"].values()
    compact = [entry for entry in entries if type(entry) is CompactRecord]
    assert len(compact) == 22  # the first two define names and types; the last has two blocks
    assert len(set(map(id, compact))) == 6


@pytest.mark.parametrize("seed", range(2))
def test_changed_metadata_are_read_or_refused_as_without_forms(seed: int) -> None:
    data, rng = pickle.dumps(metadata(), 4), random.Random(seed)
    for _ in range(120):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(data))] = rng.choice((rng.randrange(256), data[rng.randrange(len(data))]))
        assert outcome(bytes(changed), FORMS) == outcome(bytes(changed), FORMS[:-1])


def test_objects_count_as_old_when_the_collector_was_paused() -> None:
    with thawed():
        with gc_paused():
            lists = [[i] for i in range(20_000)]
        young = {id(one) for one in gc.get_objects(generation=0)}
    assert young
    assert not young & set(map(id, lists))


def test_gc_paused_leaves_frozen_objects_frozen() -> None:
    own = [["of the program"]]
    with thawed():
        gc.freeze()
        with gc_paused():
            lists = [[i] for i in range(20_000)]
        assert not any(one is own for one in gc.get_objects())  # which lists all but what is frozen
        gc.unfreeze()
        assert any(one is own for one in gc.get_objects())
    assert len(lists) == 20_000


def test_gc_paused_does_not_count_frozen_objects_when_few_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count it takes as long as the program is large."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    gc.collect()
    with gc_paused():
        assert len([[i] for i in range(1000)]) == 1000
