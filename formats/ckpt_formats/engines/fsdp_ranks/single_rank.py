"""Read the file of one rank of several without the others.

Tensors that are complete on this rank are read like all others. If the file has parts of tensors, it is refused, and
the message names the files of the other ranks.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, StdDict, Value
from ckpt_formats.engines.fsdp_ranks.lookups import FLAT, class_of, parts, subclass

_SHARDED = ("DTensor", "ShardedTensor")
_NUMBER = re.compile(r"(?<=rank)([_-]?)(\d{1,6})(?!.*rank[_-]?\d)", re.IGNORECASE)
_PLAIN = frozenset((TensorRef, bool, int, float, str, bytes, type(None)))
_MAX_DEPTH = 40
_MAX_NAMED = 3


def whole_tree(root: dict[str, Value], path: Path) -> dict[str, Value]:
    """The tree, with plain tensors instead of distributed tensors that are complete on this rank.

    Raises `UnsupportedError` if it has blocks of DTensors or ShardedTensors, or FSDP1's flat parameters.
    """
    sharded = list(_sharded_tensors(root))
    complete = {id(record): ref for _, record in sharded if (ref := _complete_tensor(record)) is not None}
    blocks = [(name, record) for name, record in sharded if id(record) not in complete]
    flat = list(_flat_names(root))
    if blocks or flat:
        world = max((_world(record) for _, record in blocks), default=0)
        kind = f"a block of a {class_of(blocks[0][1])}" if blocks else "a part of FSDP's flat parameter"
        raise _only_a_part(kind, blocks[0][0] if blocks else flat[0], world, path)
    return {key: _replaced(value, complete, 0) for key, value in root.items()} if complete else root


def other_files(path: Path, world: int) -> str:
    """The names of the other ranks' files for a message, derived from the name of this file."""
    own = _NUMBER.search(path.name)
    if own is None:
        return f"the files of all {world} ranks" if world else "the files of all ranks"
    other_ranks = [rank for rank in range(world or int(own[2]) + 2) if rank != int(own[2])]
    names = [
        f"{path.name[: own.start()]}{own[1]}{rank:0{len(own[2])}d}{path.name[own.end() :]}"
        for rank in other_ranks[:_MAX_NAMED]
    ]
    return f"{', '.join(map(printable, names))}{'' if world and len(other_ranks) <= _MAX_NAMED else ', …'}"


def _only_a_part(kind: str, name: str, world: int, path: Path) -> UnsupportedError:
    ranks = f" of {world}" if world else " of several"
    return UnsupportedError(
        f"is the file of one rank{ranks}: `{printable(name)}` is {kind}, not a complete tensor",
        where=path,
        hint=f"Also needed: {other_files(path, world)}. Put all of them into one folder, and name the folder.",
    )


def _sharded_tensors(root: Mapping[str, Value]) -> Iterator[tuple[str, Record]]:
    """The distributed tensors with their names. Each container is visited once."""
    seen: set[int] = set()
    waiting: list[tuple[str, Value]] = [("", root)]
    while waiting:
        name, value = waiting.pop()
        record = subclass(value)
        if record is not None and class_of(record) in _SHARDED:
            yield name, value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = [(key, item) for key, item in items if type(item) not in _PLAIN]
            waiting += reversed([(f"{name}.{key}" if name else str(key), item) for key, item in inner])


def _flat_names(root: Mapping[str, Value]) -> Iterator[str]:
    """The names of FSDP1's flat parameters, in the tree's values and in dicts one level below."""
    for key, value in root.items():
        inner = value.items() if isinstance(value, dict) else ((key, value),)
        for name, one in inner:
            if isinstance(name, str) and name.rpartition(".")[2] == FLAT and isinstance(one, TensorRef):
                yield name


def _complete_tensor(value: Value) -> TensorRef | None:
    """The tensor, if it is complete on this rank and not a term of a sum; otherwise None."""
    record = subclass(value)
    if record is None:
        return None
    if class_of(record) == "DTensor":
        state = {key: one for part in parts(record.args[3]) for key, one in part.items()}
        local, spec = state.get("_local_tensor"), state.get("_spec")
        shape = record.args[2][2] if isinstance(record.args[2], tuple) and len(record.args[2]) > 2 else None
        placements = spec.get("placements") if isinstance(spec, Record) else None
        sums = [one for one in placements or () if not isinstance(one, Record) or "Partial" in one.cls.name]
        return local if isinstance(local, TensorRef) and _same(local.shape, shape) and not sums else None
    state = record.args[3]
    shards, metadata = state[:2] if isinstance(state, tuple) and len(state) > 1 else (None, None)
    only = shards[0] if isinstance(shards, list) and len(shards) == 1 else None
    shard = only.get("tensor") if isinstance(only, Record) else None
    size = metadata.get("size") if isinstance(metadata, Record) else None
    return shard if isinstance(shard, TensorRef) and _same(shard.shape, size) else None


def _same(shape: tuple[int, ...], size: Value) -> bool:
    return isinstance(size, (tuple, list)) and tuple(size) == shape


def _world(value: Value) -> int:
    """The number of ranks over which a tensor is distributed; 0 if it is not stated."""
    record = subclass(value)
    if record is None:
        return 0
    if class_of(record) == "DTensor":
        spec = next((part["_spec"] for part in parts(record.args[3]) if "_spec" in part), None)
        mesh = spec.get("mesh") if isinstance(spec, Record) else None
        ranks = mesh.get("_rank_map", mesh.get("mesh")) if isinstance(mesh, Record) else None
        return ranks.size if isinstance(ranks, TensorRef) else 0
    state = record.args[3]
    group = state[2] if isinstance(state, tuple) and len(state) > 2 else None
    world = group.get("global_world_size") if isinstance(group, Record) else None
    return world if type(world) is int else 0


def _replaced(value: Value, complete: Mapping[int, TensorRef], depth: int) -> Value:
    if id(value) in complete:
        return complete[id(value)]
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        copy: dict[Value, Value] = {}
        if isinstance(value, StdDict):
            copy = StdDict(value.cls, value.factory)
            copy.attrs = value.attrs
        copy.update((key, _replaced(item, complete, depth + 1)) for key, item in value.items())
        return copy
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, complete, depth + 1) for item in value)
    return value
