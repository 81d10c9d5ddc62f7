"""Logs of gradients written by hand, record by record, with the states that must be restored from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs.gradients import gradient_codec
from ckpt_codecs.optimizers import Adam
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import (
    LoggedOptimizer,
    LoggedTensor,
    OptimizerVector,
    RankLayout,
    SegmentLayout,
    VectorPart,
)
from ckpt_formats.universal.gradients.random_states import GeneratorState, RandomStateEncoder
from ckpt_formats.universal.gradients.record import FileHead, Kind, hash_values, record_parts
from ckpt_formats.universal.gradients.segment import rank_file

SHAPES = {"w": (3, 4), "b": (5,), "v": (2, 3, 2)}
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
    {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0, "decoupled_weight_decay": False},
]
GROUPS = (("w", "v"), ("b",))
STATES = ("param", "exp_avg", "exp_avg_sq")
TIME = "2026-01-01T00:00:00Z"


@dataclass
class Entry:
    """A record that is yet to be written."""

    kind: int
    step: int
    meta: dict[str, Any]
    chunks: list[bytes] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    """The XXH3-64 of each chunk's values."""


@dataclass
class Log:
    """A segment in a chain, as it will be written, and what must be restored from it."""

    layout: SegmentLayout
    ranks: list[list[Entry]]
    truth: list[dict[str, dict[str, Array]]]
    """By step: tensors' states."""

    def copy(self) -> Log:
        return Log(self.layout, deepcopy(self.ranks), self.truth)

    def write(self, run: Path, layout: bytes | None = None, chain: bytes | None = None) -> Path:
        """A chain of this segment alone, all sealed; its folder. The bytes of layout and list may be others."""
        folder = run / f"gradients-{self.layout.first:010d}"
        folder.mkdir(parents=True)
        layout = layouts.dump(self.layout) if layout is None else layout
        (folder / layouts.NAME).write_bytes(layout)
        for rank, entries in enumerate(self.ranks):
            (folder / rank_file(rank)).write_bytes(self.content(rank, entries, layout))
        line = LoggedSteps(folder.name, self.layout.run, self.layout.first, None, self.layout.parent, TIME)
        (run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), (line,))) if chain is None else chain)
        return folder

    def content(self, rank: int, entries: Sequence[Entry], layout: bytes) -> bytes:
        """The bytes of a rank's file."""
        head = FileHead(rank, len(self.ranks), self.layout.first, layouts.identity(layout)).dump()
        content, previous = [head], int.from_bytes(head[56:], "little")
        for one in entries:
            parts, previous = record_parts(one.kind, one.step, one.meta, one.chunks, one.values, previous)  # type: ignore[arg-type]
            content += map(bytes, parts)
        return b"".join(content)


def small_layout(first: int = 0, scale: int = 1) -> SegmentLayout:
    """Three tensors on two ranks, one of them cut, in two groups. They are `scale` times as long as `SHAPES`."""
    shapes = {name: (scale * shape[0], *shape[1:]) for name, shape in SHAPES.items()}
    tensors = tuple(LoggedTensor(name, "float32", shape) for name, shape in shapes.items())
    w, b = Box.whole(shapes["w"]), Box.whole(shapes["b"])
    v, cut, size = (Box((0, 0, 0), (scale, 3, 2)), Box((scale, 0, 0), (2 * scale, 3, 2))), 7 * scale, 6 * scale
    vectors = (OptimizerVector(0, 0, first), OptimizerVector(0, 1, first), OptimizerVector(0, 0, first))
    ranks = (
        RankLayout(vectors, (VectorPart(0, 0, 0, cut, cut, w), VectorPart(2, 2, 0, size, size, v[0]))),
        RankLayout(
            vectors,
            (
                VectorPart(0, 0, cut, 12 * scale, 5 * scale, w),
                VectorPart(1, 1, 0, 5 * scale, 5 * scale, b),
                VectorPart(2, 2, 0, size, size, v[1]),
            ),
        ),
    )
    optimizer = LoggedOptimizer("torch.optim.adamw.AdamW", "adam-fused", "exact", {"values": 5}, GROUPS)
    return SegmentLayout("run", first, "exact", tensors, (optimizer,), ranks, {"other": "w"}, {"torch": "2.13"}, None)


def small_log(steps: int = 3, seed: int = 1, scale: int = 1) -> Log:
    """A run of Adam with notes and fingerprints."""
    random = np.random.default_rng(seed)
    layout = small_layout(scale=scale)
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    state: dict[str, dict[str, Array]] = {
        name: {
            "param": random.standard_normal(shape).astype(np.float32),
            "exp_avg": _zeros(shape),
            "exp_avg_sq": _zeros(shape),
        }
        for name, shape in shapes.items()
    }
    truth = [deepcopy(state)]
    ranks: list[list[Entry]] = [[], []]
    generators = [RandomStateEncoder() for _ in ranks]
    ranks[0].append(Entry(Kind.NOTES, 0, {"notes": {}, "groups": [encode(OPTIONS)]}))
    for rank, entries in enumerate(ranks):
        for name in STATES:
            values = vector(layout, rank, {tensor: held[name] for tensor, held in state.items()})
            entries.append(coded(layout, rank, Kind.STATE, 0, {"state": name}, values))
        entries.append(fingerprint(layout, rank, 0, state))
    for step in range(1, steps + 1):
        gradients = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for name, held in state.items():
            group = next(i for i, names in enumerate(GROUPS) if name in names)
            flat = {key: values.reshape(-1) for key, values in held.items()}
            Adam(**OPTIONS[group]).apply(flat, gradients[name].reshape(-1), step, gradients[name].size)
        truth.append(deepcopy(state))
        for rank, entries in enumerate(ranks):
            meta = {"groups": encode(OPTIONS)}
            entries.append(coded(layout, rank, Kind.GRADIENTS, step, meta, vector(layout, rank, gradients)))
            entries.append(Entry(Kind.RANDOM, step, *generators[rank].record(random_states(rank, step))))
            if rank == 0:
                entries.append(Entry(Kind.NOTES, step, {"notes": encode({"seen": step, "shape": (1, 2)})}))
    for rank, entries in enumerate(ranks):
        entries.append(fingerprint(layout, rank, steps, state))
        entries.append(Entry(Kind.END, steps, {}))
    return Log(layout, ranks, truth)


def random_states(rank: int, step: int) -> dict[str, GeneratorState]:
    """The generators that change in a step, as a recorder gives them to its writer."""
    words = np.arange(16, dtype=np.uint8)
    numpy = {"numpy": GeneratorState({"keys": None, "position": step}, words)} if step % 2 else {}
    return {"torch": GeneratorState({}, words + np.uint8((rank + step) % 256)), **numpy}


def _zeros(shape: tuple[int, ...]) -> Array:
    return np.zeros(shape, np.float32)


def vector(layout: SegmentLayout, rank: int, tensors: Mapping[str, Array]) -> Array:
    """What a rank has of whole tensors."""
    parts = [
        tensors[layout.tensors[piece.tensor].name][piece.box.index].reshape(-1)[piece.start : piece.stop]
        for piece in layout.ranks[rank].parts
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def coded(layout: SegmentLayout, rank: int, kind: Kind, step: int, meta: dict[str, Any], values: Array) -> Entry:
    """A record of a rank's vector."""
    parts = [values[slice(*layout.ranks[rank].chunk_bounds(i))] for i in range(layout.ranks[rank].chunk_count)]
    codec = gradient_codec("exact")
    return Entry(kind, step, meta, [bytes(codec.encode(part, None)) for part in parts], list(map(hash_values, parts)))


def fingerprint(layout: SegmentLayout, rank: int, step: int, state: Mapping[str, Mapping[str, Array]]) -> Entry:
    """A record of the hashes of a rank's states."""
    digests = {}
    for name in next(iter(state.values())):
        values = vector(layout, rank, {tensor: held[name] for tensor, held in state.items()})
        one = layout.ranks[rank]
        digests[name] = [hash_values(values[slice(*one.chunk_bounds(i))]) for i in range(one.chunk_count)]
    return Entry(Kind.FINGERPRINT, step, {"digests": digests})


def restored(run: Path, step: int) -> Checkpoint:
    """The state at a step of a chain."""
    return states.open_state(run, chain_file.load(run / chain_file.NAME), step)


def values_of(checkpoint: Checkpoint) -> dict[str, dict[str, Array]]:
    """All tensors' states, by the names of the log."""
    return {
        name: {to_stored(state): read(tensor) for state, tensor in parameter.states.items()}
        for name, parameter in checkpoint.parameters.items()
    }


def same(actual: Mapping[str, Mapping[str, Array]], wanted: Mapping[str, Mapping[str, Array]]) -> bool:
    """Are they alike in every bit?"""
    return {(n, s): v.tobytes() for n, held in actual.items() for s, v in held.items()} == {
        (n, s): v.tobytes() for n, held in wanted.items() for s, v in held.items()
    }


HOSTILE: list[Any] = [
    *(-1, 0, 1, 7, 1 << 31, 1 << 53, 1 << 62, 1 << 80, 0.5, 1e308, float("nan")),
    *(True, None, "", "x", "../x", "\ud800", [], {}, [[]], [1], [5, 1], ["x"], [None], {"$tuple": [0.9]}, {"$exec": 1}),
    *({"$array": {"dtype": "<f8", "data": "", "shape": [1 << 60]}}, {"x": 1}, {"$dict": [[{"$tuple": [1]}, 2]]}),
]


def mutants(fields: Any) -> Iterable[tuple[str, Any]]:
    """Copies of some JSON, each with one place that is otherwise, and which place that is."""
    return ((what, change()) for what, change in changes(fields))


def changes(fields: Any) -> Iterable[tuple[str, Callable[[], Any]]]:
    """The same, where a copy is made only when it is asked for."""
    for path in _places(fields):
        shown, changed = ".".join(map(str, path)), partial(_changed, fields, path)
        for value in HOSTILE:
            yield (
                f"{shown} = {value!r:.30}",
                partial(changed, lambda holder, key, value=value: holder.__setitem__(key, value)),
            )
        yield f"{shown} missing", partial(changed, lambda holder, key: holder.__delitem__(key))
        if isinstance(_at(fields, path), list):
            yield f"{shown} twice", partial(changed, lambda holder, key: holder.__setitem__(key, holder[key] * 2))
            yield f"{shown} reversed", partial(changed, lambda holder, key: holder[key].reverse())
        if isinstance(_at(fields, path), (list, str)):
            yield (
                f"{shown} longer",
                partial(changed, lambda holder, key: holder.__setitem__(key, holder[key] + holder[key][:1])),
            )


def _places(fields: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    keys = fields if isinstance(fields, dict) else range(len(fields)) if isinstance(fields, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(fields[key], (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(fields: Any, path: tuple[Any, ...], change: Any) -> Any:
    copy = deepcopy(fields)
    change(_at(copy, path[:-1]), path[-1])
    return copy
