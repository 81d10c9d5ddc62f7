"""The content id of a checkpoint: a hash of what it holds, however it is stored. See docs/format.md."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Group
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.values import Value
from ckpt_formats.universal.boxes.table import BoxTable
from ckpt_formats.universal.index import Index, item_numbers


def content_id(
    index: Index,
    groups: Sequence[Group],
    aliases: Mapping[str, str],
    extras: Mapping[str, Value],
    boxes: BoxTable | None = None,
) -> str:
    """The content id. Equal for equal names, types, shapes, values and extras; of boxes, only for equal boxes.

    It is computed over columns in the order of names, as they are stored, so that a million states take less than a
    second.
    """
    columns, tables = index.columns, index.tables
    encoded = index.encoded_names()
    order = sorted(range(len(encoded)), key=encoded.__getitem__)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    states, state_names = _sorted(columns["state.name"], list(map(to_stored, tables.states)))
    dtypes, dtype_names = _sorted(columns["state.dtype"], tables.dtypes)
    values, value_texts = _sorted(columns["parameter.values"], [canonical(encode(dict(one))) for one in tables.values])
    rows = np.lexsort((states, rank[columns["state.parameter"]]))
    counts = np.bincount(columns["state.parameter"], minlength=len(index))
    ranks, chunks = columns["state.rank"].astype(np.int64), index.chunk_counts
    result = hashlib.blake2b(digest_size=32)
    places = dict(zip(index.names, rank.tolist(), strict=True)) if boxes is None else _places(boxes)
    result.update(
        canonical(
            {
                "aliases": dict(aliases),
                "dtypes": dtype_names,
                "extras": encode(extras),
                "groups": [
                    {"options": encode(g.options), "parameters": [places[name] for name in g.names]} for g in groups
                ],
                "parameters": len(index),
                "states": state_names,
                "values": [json.loads(text) for text in value_texts],
            }
        ).encode()
    )
    for column in (
        np.array([len(encoded[i]) for i in order], "<u4"),
        np.frombuffer(b"".join(encoded[i] for i in order), "u1"),
        columns["parameter.role"][order],
        values[order].astype("<u4"),
        counts[order].astype("<u4"),
        states[rows].astype("<u2"),
        dtypes[rows].astype("u1"),
        columns["state.rank"][rows],
        columns["state.dims"][item_numbers(ranks, rows)],
        columns["chunk.values"][item_numbers(chunks, rows)],
        *(() if boxes is None else _of_boxes(boxes, np.array(order, np.int64))),
    ):
        result.update(np.ascontiguousarray(column).data)
    return "blake2b-256:" + result.hexdigest()


def _places(boxes: BoxTable) -> dict[str, int]:
    """The place of each parameter of a checkpoint of boxes, sorted by name."""
    return {name: place for place, (_, name) in enumerate(sorted(zip(boxes.encoded_names(), boxes.names, strict=True)))}


def _of_boxes(boxes: BoxTable, order: Array) -> Iterator[Array]:
    """The columns of boxes, which follow the others. `order`: the rows of the boxes, sorted by name."""
    columns, encoded = boxes.columns, sorted(boxes.encoded_names())
    places = _places(boxes)
    owners = np.array([places[boxes.names[number]] for number in boxes.owners], "<u4")
    axes = item_numbers(columns["box.rank"].astype(np.int64), order)
    yield np.array([len(name) for name in encoded], "<u4")
    yield np.frombuffer(b"".join(encoded), "u1")
    yield owners[order]
    yield columns["box.rank"][order]
    yield columns["box.first"][order]
    for name in ("box.dims", "box.start", "box.stop"):
        yield columns[name][axes]


def canonical(value: Any) -> str:
    """JSON with sorted keys, without spaces: equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sorted(column: Array, table: Sequence[str]) -> tuple[Array, list[str]]:
    """The items of a table that a column refers to, sorted, each once; and the column with their new numbers."""
    used = distinct(column).tolist()
    items = sorted({table[number] for number in used})
    numbers = np.zeros(max(used, default=-1) + 1, np.int64)
    places = {item: place for place, item in enumerate(items)}
    numbers[used] = [places[table[number]] for number in used]
    return numbers[column], items
