"""A file that one rank of several saved, read by itself.

A tensor that the rank has all of is a tensor as any other. Parts of tensors are no model: the file is refused, and the
files of the other ranks are named.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, StdDict, Value
from ckpt_formats.engines.fsdp_ranks.flat_parameter import FLAT
from ckpt_formats.engines.fsdp_ranks.lookups import class_of, parts, subclass

_SPREAD = ("DTensor", "ShardedTensor")
_NUMBER = re.compile(r"(?<=rank)([_-]?)(\d{1,6})(?!.*rank[_-]?\d)", re.IGNORECASE)
_MOST_DEPTH = 40
_MOST_NAMED = 3


def whole_tree(root: dict[str, Value], path: Path) -> dict[str, Value]:
    """The tree, with plain tensors for those of many ranks that this one has all of.

    Raises `Unsupported` if it holds blocks of DTensors or ShardedTensors, or FSDP1's flat parameters.
    """
    found = list(_spread(root))
    whole = {id(record): ref for _, record in found if (ref := _whole(record)) is not None}
    blocks = [(name, record) for name, record in found if id(record) not in whole]
    flat = list(_flat_names(root))
    if blocks or flat:
        world = max((_world(record) for _, record in blocks), default=0)
        kind = f"a block of a {class_of(blocks[0][1])}" if blocks else "a part of FSDP's flat parameter"
        raise _part(kind, blocks[0][0] if blocks else flat[0], world, path)
    return {key: _replaced(value, whole, 0) for key, value in root.items()} if whole else root


def other_files(path: Path, world: int) -> str:
    """What the files of the other ranks are called, as far as this one's name tells."""
    own = _NUMBER.search(path.name)
    if own is None:
        return f"the files of all {world} ranks" if world else "the files of all ranks"
    others = [rank for rank in range(world or int(own[2]) + 2) if rank != int(own[2])]
    names = [
        f"{path.name[: own.start()]}{own[1]}{rank:0{len(own[2])}d}{path.name[own.end() :]}"
        for rank in others[:_MOST_NAMED]
    ]
    return f"{', '.join(map(printable, names))}{'' if world and len(others) <= _MOST_NAMED else ', …'}"


def _part(kind: str, name: str, world: int, path: Path) -> Unsupported:
    ranks = f" of {world}" if world else " of several"
    return Unsupported(
        f"is what one rank{ranks} holds: `{printable(name)}` is {kind}, not a whole tensor",
        where=path,
        hint=f"Needed too: {other_files(path, world)}. Put all of them into one folder, and name the folder.",
    )


def _spread(root: Mapping[str, Value]) -> Iterator[tuple[str, Record]]:
    """Tensors of many ranks, by name. Each container is looked at once."""
    seen: set[int] = set()
    waiting: list[tuple[str, Value]] = [("", root)]
    while waiting:
        name, value = waiting.pop()
        record = subclass(value)
        if record is not None and class_of(record) in _SPREAD:
            yield name, value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += reversed([(f"{name}.{key}" if name else str(key), item) for key, item in items])


def _flat_names(root: Mapping[str, Value]) -> Iterator[str]:
    """Names of FSDP1's flat parameters, in dicts and dicts in dicts."""
    for key, value in root.items():
        inner = value.items() if isinstance(value, dict) else ((key, value),)
        for name, one in inner:
            if isinstance(name, str) and name.rpartition(".")[2] == FLAT and isinstance(one, TensorRef):
                yield name


def _whole(value: Value) -> TensorRef | None:
    """The tensor, if this rank has all of it, and not a part of a sum."""
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
    held, metadata = state[:2] if isinstance(state, tuple) and len(state) > 1 else (None, None)
    shard = held[0].get("tensor") if isinstance(held, list) and len(held) == 1 and isinstance(held[0], Record) else None
    size = metadata.get("size") if isinstance(metadata, Record) else None
    return shard if isinstance(shard, TensorRef) and _same(shard.shape, size) else None


def _same(shape: tuple[int, ...], said: Value) -> bool:
    return isinstance(said, (tuple, list)) and tuple(said) == shape


def _world(value: Value) -> int:
    """Over how many ranks it is spread; 0 if that is not said."""
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


def _replaced(value: Value, whole: Mapping[int, TensorRef], depth: int) -> Value:
    if id(value) in whole:
        return whole[id(value)]
    if depth > _MOST_DEPTH:
        return value
    if isinstance(value, dict):
        made: dict[Value, Value] = {}
        if isinstance(value, StdDict):
            made = StdDict(value.cls, value.factory)
            made.attrs = value.attrs
        made.update((key, _replaced(item, whole, depth + 1)) for key, item in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, whole, depth + 1) for item in value)
    return value
