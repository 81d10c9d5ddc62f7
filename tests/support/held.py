"""Arrays with every awkward value, checkpoints made of them, and random cuts of them in real files."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter, Role
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS, DType, is_float
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Array, ArrayBlob, FileBlob, Fragment, Tensor, read
from ckpt_formats.core.values import Value

STORABLE = [DTYPES[name] for name in SAFETENSORS_TAGS]
"""Every element type that a safetensors file, and so the universal format, can hold."""
FLOATS = [dtype for dtype in STORABLE if is_float(dtype)]

SHAPES: list[Shape] = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (1, 9, 1), (2, 3, 4), (2, 1, 3, 2)]


def array(dtype: DType, shape: Shape, seed: int = 0) -> Array:
    """Random bits: NaNs with payloads, infinities, denormals and both zeros among them. The same for the same seed."""
    random = np.random.default_rng([seed, *shape, *dtype.name.encode()])
    bits = random.integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    if dtype == np.bool_:
        bits &= 1
    values = bits.view(dtype)
    if is_float(dtype) and dtype.name != "float8_e8m0fnu":
        for i, value in enumerate(_awkward(dtype)[: values.size]):
            values[i : i + 1].view(np.uint8)[:] = value
    return values.reshape(shape)


def _awkward(dtype: DType) -> list[Array]:
    """Bits of -0.0, the least denormal, a NaN with a payload and its negative."""
    wide = f"u{dtype.itemsize}"
    top = 1 << (8 * dtype.itemsize - 1)
    payload = int(np.array([np.nan], dtype).view(wide)[0]) | 1
    return [np.array([bits], wide).view(np.uint8) for bits in (top, 1, payload & ~top, payload | top)]


def bits(values: Array) -> tuple[str, Shape, bytes]:
    """What makes two arrays the same: type, shape and every bit."""
    return values.dtype.name, values.shape, values.tobytes()


def shapes(most_axes: int = 4, most_length: int = 5) -> st.SearchStrategy[Shape]:
    return st.lists(st.integers(0, most_length), max_size=most_axes).map(tuple)


@st.composite
def arrays(draw: st.DrawFn, dtypes: Iterable[DType] = STORABLE) -> Array:
    return array(draw(st.sampled_from(list(dtypes))), draw(shapes()), draw(st.integers(0, 1000)))


def tensor(values: Array) -> Tensor:
    return Tensor.of(ArrayBlob(values))


def named(stored: Mapping[str, Array]) -> dict[str, Array]:
    """The states of a chunk as codecs name them, by the names of the library."""
    return {from_stored(name): values for name, values in stored.items()}


def parameter(name: str, states: Mapping[str, Array], role: Role = "parameter", **values: Value) -> Parameter:
    return Parameter(name, role, {state: tensor(content) for state, content in states.items()}, values)


ORIGIN = Origin("held", "1.0", 7, {"tp": 2})
HELD = Path("/held")


def checkpoint(
    parameters: Iterable[Parameter],
    groups: tuple[Group, ...] = (),
    extras: Mapping[str, Value] | None = None,
    aliases: Mapping[str, str] | None = None,
    origin: Origin = ORIGIN,
    path: Path = HELD,
) -> Checkpoint:
    """A checkpoint in memory."""
    return Checkpoint(
        path=path,
        origin=origin,
        parameters={p.name: p for p in parameters},
        groups=groups,
        extras=extras or {},
        aliases=aliases or {},
    )


def contents(source: Checkpoint) -> dict[tuple[str, str], tuple[str, Shape, bytes]]:
    """Every bit of every state."""
    return {(p.name, state): bits(read(stored)) for p, state, stored in source.tensors()}


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh folder for one example: Hypothesis runs many in one test."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """Any block of a tensor, empty ones too."""
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def cuts(draw: st.DrawFn, shape: Shape, most: int = 4) -> list[Box]:
    """Disjoint blocks that cover a tensor, in any order."""
    parts = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, most)) if shape else 0):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(part.start[axis], part.stop[axis]))
        parts.append(Box(part.start, (*part.stop[:axis], at, *part.stop[axis + 1 :])))
        parts.append(Box((*part.start[:axis], at, *part.start[axis + 1 :]), part.stop))
    return draw(st.permutations([part for part in parts if part.size]))


@st.composite
def placements(draw: st.DrawFn, shape: Shape, itemsize: int) -> tuple[int, Shape]:
    """Where a block may lie in a file: an offset, and strides in bytes of any order of axes with any holes."""
    strides, step = [0] * len(shape), itemsize
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= max(shape[axis], 1) + draw(st.integers(0, 2))
    return draw(st.integers(0, 100)), tuple(strides)


def lay(path: Path, values: Array, offset: int, strides: Shape) -> FileBlob:
    """Write an array into a file of noise, at an offset and with strides."""
    raw = FileBlob(path, offset, values.shape, values.dtype, strides)
    file = np.frombuffer(os.urandom(offset + raw.span + 9), np.uint8).copy()
    if values.size:
        np.ndarray(values.shape, values.dtype, file, offset, strides)[...] = values
    path.write_bytes(file.tobytes())
    return raw


@st.composite
def scattered(draw: st.DrawFn, at: Path, values: Array) -> Tensor:
    """An array cut at random, each block lying somewhere in a file of its own."""
    parts = []
    for i, box in enumerate(draw(cuts(values.shape))):
        offset, strides = draw(placements(box.shape, values.dtype.itemsize))
        parts.append(Fragment(box, lay(at / f"{i}.bin", values[box.index], offset, strides)))
    return Tensor(values.shape, values.dtype, tuple(parts))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        (old,) = file.read(1)
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))


def everything(seed: int = 0) -> Checkpoint:
    """A checkpoint with one of each thing that checkpoints have."""
    bf16, f32 = DTYPES["bfloat16"], DTYPES["float32"]
    master = array(f32, (6, 5), seed)
    with np.errstate(all="ignore"):
        copy = master.astype(bf16)
    ordinary = parameter(
        "layers.0.w", {"master": master, "model": copy, "exp_avg": array(f32, (6, 5), seed + 1)}, step=3
    )
    differing = parameter(
        "layers.1.w", {"master": array(f32, (4,), seed), "model": array(bf16, (4,), seed + 2)}, step=4
    )
    single = [
        parameter("alone", {"model": array(f32, (2, 2), seed), "exp_avg": array(f32, (2, 2), seed + 3)}, step=3),
        parameter("frozen", {"model": array(bf16, (3, 1), seed)}, "frozen"),
        parameter("count", {"model": array(DTYPES["int64"], (), seed)}, "buffer"),
        parameter("empty", {"model": array(f32, (0, 4), seed)}, "buffer"),
    ]
    extra = parameter("rng/cpu", {"model": array(DTYPES["uint8"], (16,), seed)}, "extra")
    return checkpoint(
        [ordinary, differing, *single, extra],
        (Group({"lr": 1e-3, "betas": (0.9, 0.95)}, ("layers.0.w", "alone")), Group({"lr": 0.5}, ("layers.1.w",))),
        {"epoch": 2, "note": "text", "nested": {"a": [1, None, True], "b": (1.5, b"bytes")}},
        {"head.w": "layers.0.w"},
    )


def plain(value: Any) -> Any:
    """A value in a form in which `==` compares types and bits too."""
    from ckpt_formats.core.values import Record, StdDict

    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return "float", np.float64(value).tobytes()
    if isinstance(value, complex):
        return "complex", np.complex128(value).tobytes()
    if isinstance(value, StdDict):
        return "std", value.cls, value.factory, plain(value.attrs), [(plain(k), plain(v)) for k, v in value.items()]
    if isinstance(value, dict):
        return type(value).__name__, [(plain(k), plain(v)) for k, v in value.items()]
    if isinstance(value, Record):
        fields = (value.cls, value.args, value.kwargs, value.state, value.items, value.mapping, value.new)
        return ("record", *map(plain, fields))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(plain, value)))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    return type(value).__name__, value


def states(steps: int, elements: int = DEFAULT_ELEMENTS + 9) -> Iterator[Checkpoint]:
    """A run: a matrix of two chunks, one whose copy is not its master rounded, small ones, and odd lengths."""
    generator = np.random.default_rng(3)
    shapes = {"large": (elements,), "differs": (90, 70), **{f"small{i}": (60 + i, 33) for i in range(8)}}
    held = {name: [generator.standard_normal(shape).astype(np.float32) for _ in "wm"] for name, shape in shapes.items()}
    for step in range(1, steps + 1):
        parameters = []
        for name, (w, m) in held.items():
            m = m * np.float32(0.9) + generator.standard_normal(w.shape).astype(np.float32)
            w = w - np.float32(1e-4) * m
            held[name] = [w, m]
            copy = w.astype(DTYPES["bfloat16"])
            if name == "differs":
                copy[0, 0] = 77
            parameters.append(parameter(name, {"master": w, "model": copy, "exp_avg": m}, step=step))
        parameters.append(parameter("odd", {"model": np.arange(7, dtype=np.int8)}, "buffer"))
        yield checkpoint(parameters, (Group({"lr": 1e-4}, tuple(shapes)),), origin=Origin("held", None, step))


def assert_shows(view: Tensor, values: Array, data: st.DataObject) -> None:
    """All of it is the array, and so are a block of it and a block of that."""
    for _ in range(3):
        assert list(view.problems()) == []
        assert bits(read(view)) == bits(values)
        box = data.draw(boxes(values.shape))
        view, values = view.crop(box), values[box.index]
