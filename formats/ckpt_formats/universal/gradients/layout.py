"""The layout of a segment of the log: its tensors, the parts of them that each rank has, and the optimizers.

The parts of a rank form its vector, in order; a record has one value for each element of the vector. The vector is
split into the same chunks at every step, so one chunk of a step can be read without the others.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.claims import MAX_INDEX, MAX_RANKS, MAX_STEPPED_ELEMENTS
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.values import Value
from ckpt_formats.core.version import WRITTEN_BY

NAME = "layout.json"
VERSION, UNCLASSED = 3, 2
"""What this program reads at most, and what it writes if no chunk can be of mode 12, so that older ones read it."""
CLASSED = ("int8",)
"""The codecs whose chunks may be of mode 12."""
CHUNK = 1 << 18
"""The maximum number of elements in a chunk."""
ALONE = 1 << 16
"""A part with this many elements, or more, shares no chunk with other parts."""
MAX_WHOLE = 1 << 26
"""The maximum number of elements of a tensor that is stepped as a whole."""
MAX_THREADS = 1 << 10
"""The maximum number of threads with which a step is replayed: each takes memory."""
UPDATE = "update"
"""The method of an optimizer whose steps are not replayed: the log has the states after each step (`Kind.VALUES`)."""
STEPPED = ("float32", "bfloat16", "float16")
"""The dtypes whose steps can be replayed. The log has values of each as float32, which loses nothing."""
Exactness = Literal["exact", "same library", "approximate"]
EXACTNESS: tuple[Exactness, ...] = get_args(Exactness)


@dataclass(frozen=True)
class LoggedTensor:
    """A tensor that an optimizer steps."""

    name: str
    dtype: str
    """The dtype of the model's copy."""
    shape: Shape
    stepped: str = "float32"
    """The dtype of the weights that the optimizer steps, and of its states: one of `STEPPED`."""


@dataclass(frozen=True)
class OptimizerVector:
    """One tensor of a rank's optimizer: a parameter, a shard of one, or a flat partition of many."""

    optimizer: int
    group: int
    count: int
    """The number of its steps before the start of the segment."""


@dataclass(frozen=True)
class VectorPart:
    """A rank's part of a tensor: the elements `start` to `stop`, in C order, of a block of it."""

    tensor: int
    vector: int
    start: int
    stop: int
    vectorized: int
    """The number of elements, from the first one, that are in complete SIMD vectors of the optimizer's own tensor."""
    box: Box
    """The position of the block in the full tensor."""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChunkRange:
    """The range of a vector part that is in one chunk."""

    part: VectorPart
    start: int
    """Counted from the first element of the part."""
    stop: int
    offset: int
    """The index of its first element in the chunk."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def vectorized(self) -> int:
        """The number of its elements that are in complete SIMD vectors."""
        return min(max(self.part.vectorized - self.start, 0), self.size)


@dataclass(frozen=True)
class RankLayout:
    """The vector of one rank."""

    vectors: tuple[OptimizerVector, ...]
    parts: tuple[VectorPart, ...]
    whole: frozenset[int] = frozenset()
    """The optimizers that step whole tensors, which are not split into chunks."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index in the vector where each part starts; the last entry is the size of the vector."""
        return tuple(accumulate((part.size for part in self.parts), initial=0))

    @property
    def size(self) -> int:
        return self.starts[-1]

    @cached_property
    def _runs(self) -> tuple[list[int], list[int], list[int]]:
        """The start of each run that is split into chunks, and the number of its first chunk; then the two ends. And
        the number of elements in each of its chunks but the last."""
        starts, first, sizes = [0], [0], list[int]()

        def close(at: int, size: int = CHUNK) -> None:
            if at > starts[-1]:
                first.append(first[-1] - (starts[-1] - at) // size)
                starts.append(at)
                sizes.append(size)

        for part, start, stop in zip(self.parts, self.starts, self.starts[1:], strict=False):
            if stop - start >= ALONE or stop - starts[-1] > CHUNK:
                close(start)
            if stop - start >= ALONE:
                close(stop, stop - start if self.vectors[part.vector].optimizer in self.whole else CHUNK)
        close(self.size)
        return starts, first, sizes

    @property
    def chunk_count(self) -> int:
        return self._runs[1][-1]

    def chunk_bounds(self, index: int) -> tuple[int, int]:
        """The start and stop of a chunk in the vector."""
        starts, first, sizes = self._runs
        run = bisect_right(first, index) - 1
        start = starts[run] + (index - first[run]) * sizes[run]
        return start, min(start + sizes[run], starts[run + 1])

    def chunk_place(self, index: int) -> tuple[Shape | None, int]:
        """The shape of the block of which a chunk has a range, and the element with which it begins, in C order.

        The shape is None if the chunk has ranges of several blocks.
        """
        first, *others = islice(self.ranges(index), 2)
        return None if others else first.part.box.shape, first.part.start + first.start

    def chunk_of(self, element: int) -> int:
        """The number of the chunk that contains an element of the vector."""
        starts, first, sizes = self._runs
        run = bisect_right(starts, element) - 1
        return first[run] + (element - starts[run]) // sizes[run]

    def ranges(self, index: int) -> Iterator[ChunkRange]:
        """The ranges of parts in a chunk, in order."""
        start, stop = self.chunk_bounds(index)
        number = bisect_right(self.starts, start) - 1
        while number < len(self.parts) and self.starts[number] < stop:
            low, high = max(self.starts[number], start), min(self.starts[number + 1], stop)
            if low < high:
                begin = self.starts[number]
                yield ChunkRange(self.parts[number], low - begin, high - begin, low - start)
            number += 1


@dataclass(frozen=True)
class LoggedOptimizer:
    """An optimizer of the run, and the method that replays its steps."""

    type: str
    """The class, such as `torch.optim.adamw.AdamW`."""
    method: str
    """The name of the method: a key of `optimizers.METHODS`, an entry point of an installed package, or `UPDATE`."""
    exactness: Exactness
    figures: Mapping[str, Value]
    """The measurements of the probe at the start of the run."""
    groups: tuple[tuple[str, ...], ...]
    """The names of the parameters in each group, in order."""
    threads: int | None = None
    """The number of threads with which it steps whole tensors: others round in another way, and so would parts of a
    tensor. None: it steps each element by itself."""


@dataclass(frozen=True)
class SegmentLayout:
    """The content of `layout.json`."""

    run: str
    first: int
    """The step of the state at the start of the segment. Its first gradients are those of the next step."""
    codec: str
    tensors: tuple[LoggedTensor, ...]
    optimizers: tuple[LoggedOptimizer, ...]
    ranks: tuple[RankLayout, ...]
    aliases: Mapping[str, str]
    versions: Mapping[str, Value]
    parent: str | None
    """The content id of the chain's state at `first`; None if the segment stores that state itself."""
    version: int = UNCLASSED

    @property
    def numel(self) -> int:
        """The number of elements of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)


def dump(layout: SegmentLayout) -> bytes:
    """The bytes of `layout.json`."""
    return sealed_json.dump(
        {
            "format": "ckpt-gradients",
            "version": VERSION if layout.codec in CLASSED else UNCLASSED,
            "written_by": WRITTEN_BY,
            "run": layout.run,
            "first": layout.first,
            "codec": layout.codec,
            "parent": layout.parent,
            "versions": encode(dict(layout.versions)),
            "aliases": dict(layout.aliases),
            "optimizers": [
                {
                    "type": one.type,
                    "method": one.method,
                    "exactness": one.exactness,
                    "figures": encode(dict(one.figures)),
                    "groups": [list(names) for names in one.groups],
                    **({} if one.threads is None else {"threads": one.threads}),
                }
                for one in layout.optimizers
            ],
            "tensors": [_tensor_json(one) for one in layout.tensors],
            "ranks": [
                {
                    "vectors": [[v.optimizer, v.group, v.count] for v in rank.vectors],
                    "parts": [_part_json(part, layout.tensors) for part in rank.parts],
                }
                for rank in layout.ranks
            ],
        }
    )


def identity(content: bytes) -> bytes:
    """The 16 bytes in the files of ranks that identify their layout."""
    return xxhash.xxh3_128_digest(content)


def load(path: Path) -> SegmentLayout:
    """Read and check a `layout.json`. Raises `CorruptError`, or `UnsupportedError` for a newer version."""
    fields = sealed_json.load(path, MAX_INDEX, "the layout of a log of gradients")
    check = FieldReader(path)
    check.true(fields.get("format") == "ckpt-gradients", "format")
    if not is_natural(fields.get("version")) or not 1 <= fields["version"] <= VERSION:
        raise UnsupportedError(
            f"the log of gradients has version {fields.get('version')!r:.30}; this program reads version {VERSION}",
            where=path,
            hint="Upgrade ckpt.",
        )
    tensors = tuple(_tensor(row, check) for row in check.sequence(fields, "tensors"))
    check.true(len({one.name for one in tensors}) == len(tensors), "tensors: a name occurs twice")
    optimizers = tuple(_optimizer(row, check) for row in check.sequence(fields, "optimizers"))
    rows = check.sequence(fields, "ranks")
    check.true(0 < len(rows) <= MAX_RANKS, "ranks")
    parent = check.get(fields, "parent")
    check.true(parent is None or isinstance(parent, str), "parent")
    aliases = check.mapping(fields, "aliases")
    check.texts(aliases.values(), "aliases")
    layout = SegmentLayout(
        check.text(fields, "run"),
        check.natural(fields, "first"),
        check.text(fields, "codec"),
        tensors,
        optimizers,
        tuple(_rank(row, tensors, optimizers, check) for row in rows),
        aliases,
        check.values(fields, "versions"),
        parent,
        fields["version"],
    )
    _check_parts(layout, check)
    return layout


def _tensor_json(tensor: LoggedTensor) -> list[Any]:
    row: list[Any] = [tensor.name, tensor.dtype, list(tensor.shape)]
    if tensor.stepped != "float32":
        row.append(tensor.stepped)
    return row


def _part_json(part: VectorPart, tensors: Sequence[LoggedTensor]) -> list[Any]:
    row: list[Any] = [part.tensor, part.vector, part.start, part.stop, part.vectorized]
    if part.box != Box.whole(tensors[part.tensor].shape):
        row.append([list(part.box.start), list(part.box.stop)])
    return row


def _naturals(row: Any, count: int, check: FieldReader, field_name: str) -> list[int]:
    check.true(isinstance(row, list) and len(row) >= count and all(map(is_natural, row[:count])), field_name)
    return list(row[:count])


def _tensor(row: Any, check: FieldReader) -> LoggedTensor:
    check.true(isinstance(row, list) and len(row) in (3, 4) and isinstance(row[0], str), "tensors")
    name, dtype, shape = row[:3]
    stepped = row[3] if len(row) > 3 else "float32"
    check.true(stepped in STEPPED, f"tensors: {name!r:.80} is stepped in an unknown dtype")
    check.true(isinstance(dtype, str) and dtype in DTYPES, f"tensors: {name!r:.80} has an unknown dtype")
    check.true(isinstance(shape, list), "tensors: a shape")
    shape = tuple(_naturals(shape, len(shape), check, "tensors: a shape"))
    fits = len(shape) <= 64 and prod(max(n, 1) for n in shape) <= MAX_STEPPED_ELEMENTS
    check.true(fits, f"tensors: {name!r:.80} is too large")
    return LoggedTensor(name, dtype, shape, stepped)


def _optimizer(row: Any, check: FieldReader) -> LoggedOptimizer:
    exactness = check.text(row, "exactness")
    check.true(exactness in EXACTNESS, f"exactness {exactness!r:.30}")
    groups = check.sequence(row, "groups")
    threads = row.get("threads")
    check.true(threads is None or (is_natural(threads) and 0 < threads <= MAX_THREADS), "threads")
    check.true(all(isinstance(group, list) for group in groups), "groups")
    return LoggedOptimizer(
        check.text(row, "type"),
        check.text(row, "method"),
        exactness,  # type: ignore[arg-type]
        check.values(row, "figures"),
        tuple(check.texts(group, "groups") for group in groups),
        threads,
    )


def _rank(
    row: Any, tensors: Sequence[LoggedTensor], optimizers: Sequence[LoggedOptimizer], check: FieldReader
) -> RankLayout:
    vectors = tuple(OptimizerVector(*_naturals(one, 3, check, "vectors")) for one in check.sequence(row, "vectors"))
    for vector in vectors:
        known = vector.optimizer < len(optimizers) and vector.group < len(optimizers[vector.optimizer].groups)
        check.true(known and vector.count < 1 << 53, "vectors: a group that does not exist")
    parts = tuple(_part(one, tensors, len(vectors), check) for one in check.sequence(row, "parts"))
    whole = frozenset(number for number, one in enumerate(optimizers) if one.threads is not None)
    for part in parts:
        if vectors[part.vector].optimizer in whole:
            check.true(part.size == part.box.size <= MAX_WHOLE, "parts: a tensor that is stepped as a whole")
    return RankLayout(vectors, parts, whole)


def _part(row: Any, tensors: Sequence[LoggedTensor], vectors: int, check: FieldReader) -> VectorPart:
    tensor, vector, start, stop, vectorized = _naturals(row, 5, check, "parts")
    check.true(tensor < len(tensors) and vector < vectors, "parts: a tensor that does not exist")
    shape = tensors[tensor].shape
    box = Box.whole(shape)
    if len(row) > 5:
        corners = row[5]
        check.true(isinstance(corners, list) and len(corners) == 2, "parts: a block")
        low, high = (tuple(_naturals(one, len(shape), check, "parts: a block")) for one in corners)
        inside = all(a <= b <= n for a, b, n in zip(low, high, shape, strict=True))
        check.true(inside and len(corners[0]) == len(corners[1]) == len(shape), "parts: a block outside its tensor")
        box = Box(low, high)
    check.true(
        (start < stop or not box.size) and start <= stop <= box.size and vectorized <= stop - start,
        "parts: elements outside their block",
    )
    return VectorPart(tensor, vector, start, stop, vectorized, box)


def _check_parts(layout: SegmentLayout, check: FieldReader) -> None:
    """Check that every element of every tensor is in exactly one part."""
    tensor_blocks: dict[int, dict[Box, list[tuple[int, int]]]] = {}
    for rank in layout.ranks:
        for part in rank.parts:
            tensor_blocks.setdefault(part.tensor, {}).setdefault(part.box, []).append((part.start, part.stop))
    updated = {name for one in layout.optimizers if one.method == UPDATE for names in one.groups for name in names}
    for number, tensor in enumerate(layout.tensors):
        blocks = tensor_blocks.get(number, {})
        if tensor.name in updated and not blocks:
            continue
        total = 0
        for box, ranges in blocks.items():
            ranges.sort()
            ends = [0, *(stop for _, stop in ranges)]
            tiled = all(start == end for (start, _), end in zip(ranges, ends, strict=False)) and ends[-1] == box.size
            check.true(tiled, f"parts: block {box} of {tensor.name!r:.80} is not covered exactly once")
            total += box.size
        check.true(total == prod(tensor.shape), f"parts: {tensor.name!r:.80} is not covered exactly once")
        if len(blocks) > 1:
            from ckpt_formats.core.geometry import overlaps

            check.true(not any(overlaps(list(blocks))), f"parts: blocks of {tensor.name!r:.80} overlap")
