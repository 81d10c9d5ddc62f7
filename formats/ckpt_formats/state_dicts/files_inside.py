"""The bytes of files with tensors inside the values of a checkpoint: they are carried, and nothing reads them."""

from collections.abc import Iterable, Iterator

from ckpt_formats.containers.file_starts import HEAD_NBYTES, is_file_inside
from ckpt_formats.core.claims import MAX_TREE_DEPTH
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import is_extra_state

HOLDS_TENSORS = "holds tensors in a file of its own, which is not read; carried as bytes"
_MAX_ITEMS = 200_000


def files_inside(values: Iterable[tuple[str, Value]]) -> Iterator[str]:
    """The places at which there are the bytes of a file with tensors, at any depth. `values`: with their places."""
    seen: set[int] = set()
    pending: list[tuple[str, Value, int]] = [(place, value, 0) for place, value in values]
    for _ in range(_MAX_ITEMS):
        if not pending:
            return
        place, value, depth = pending.pop()
        if is_extra_state(place):
            continue  # modules of Transformer Engine have a pickle each
        if isinstance(value, (bytes, bytearray)):
            if is_file_inside(bytes(value[:HEAD_NBYTES])):
                yield place
        elif isinstance(value, (dict, list, tuple, Record)) and depth < MAX_TREE_DEPTH and id(value) not in seen:
            seen.add(id(value))
            pending += ((f"{place}{key}", item, depth + 1) for key, item in _items(value))


def _items(value: Value) -> Iterator[tuple[str, Value]]:
    """The parts of a container or an object, each with what is appended to the place."""
    if isinstance(value, Record):
        yield from (("", part) for part in (*value.args, *value.kwargs.values(), value.state, *value.items))
        yield from (("", part) for pair in value.mapping for part in pair)
    elif isinstance(value, dict):
        yield from ((f".{key}", item) for key, item in value.items())
    else:
        yield from ((f".{i}", item) for i, item in enumerate(value))
