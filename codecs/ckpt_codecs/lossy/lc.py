"""LC-Checkpoint (Chen et al., "On Efficient Constructions of Checkpoints", ICML 2020): buckets of exponents."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from struct import Struct
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk import streams
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import CONSTANT, HUFFMAN, STORED
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossy import state_types, symbol_coder
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

EXACT, BUCKETS = 0, 1
CODERS = ("huffman", "packed", "context")
SCOPES = ("parameter", "state")
_ENTRY = Struct("<f")
_CONTEXT = 255
"""The kind of a stream of the range coder; the other kinds are those of `ckpt_codecs.format_ids`."""
Extremes = dict[int, tuple[float, float]]
"""The smallest and the largest value of each bucket (sign and exponent: the upper nine bits of a float32)."""


@dataclass(frozen=True)
class LcCheckpoint(DeltaCodec):
    """Groups changes of the weights by sign and exponent, and drops all but the 2^bits - 1 largest exponents.

    Each change in a bucket becomes the middle between the bucket's smallest and largest change. All states except the
    weights are exact.

    `scope`: `parameter` chooses buckets for each parameter, `state` for the full state, as published. `coder`:
    `huffman`, as published, takes at least one bit for each weight; `packed` and `context` encode the same symbols in
    fewer bits. `table`: the buckets and their values, from `fit` or `survey`.
    """

    name: ClassVar[str] = "lc"
    lossless: ClassVar[bool] = False

    bits: int = 3
    scope: str = "parameter"
    coder: str = "huffman"
    table: tuple[tuple[int, float], ...] | None = None

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 3, 4, 5) or self.scope not in SCOPES or self.coder not in CODERS:
            raise CodecError(f"lc has 1 to 5 bits, a scope of {SCOPES}, a coder of {CODERS}")
        if self.table is not None:
            try:
                table = tuple((int(key), float(value)) for key, value in self.table)
            except (TypeError, ValueError):
                raise CodecError("a table of lc must be pairs of a bucket and a number") from None
            if len(table) >= 1 << self.bits or not all(0 <= key < 512 and abs(value) < 1e39 for key, value in table):
                raise CodecError(f"a table of lc has at most {(1 << self.bits) - 1} buckets")
            object.__setattr__(self, "table", table)

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> "LcCheckpoint":
        """The codec with one table for the full state, if that is the scope. `samples` should be all chunks."""
        return self._with_table(change for _, change in samples) if self.scope == "state" else self

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "LcCheckpoint":
        return self if self.table is not None else self._with_table(changes())

    def _with_table(self, changes: Iterable[StatePair]) -> "LcCheckpoint":
        extremes: Extremes = {}
        for change in changes:
            delta = _delta(change)
            if delta is not None:
                _add_extremes(delta, extremes)
        return replace(self, table=self._largest_buckets(extremes))

    def _largest_buckets(self, extremes: Extremes) -> tuple[tuple[int, float], ...]:
        """The buckets of the largest exponents and their values, for each exponent the positive one first."""
        best = sorted(extremes, key=lambda key: (-(key & 255), key >> 8))[: (1 << self.bits) - 1]
        return tuple((key, float(np.float32((extremes[key][0] + extremes[key][1]) / 2))) for key in best)

    def encode(self, change: StatePair) -> bytes:
        form = {name: array.dtype for name, array in change.after.items()}
        state_types.check(form)
        delta, weights = _delta(change), state_types.weights_of(form)
        sections = []
        for name in state_types.in_order(form):
            data = None
            if name == weights and delta is not None:
                data = self._encode_buckets(delta)
                after = change.after[name]
                state = self._decode_buckets(data, change.before[name], delta.shape)
                state = state_types.to_state_dtype(state, after.dtype, after.shape)
                data = data if np.isfinite(state).all() else None
            kind = EXACT if data is None else BUCKETS
            sections.append(
                bytes([kind])
                + length_prefixed(bytes(Planes().encode(change.after[name], None)) if data is None else data)
            )
        return b"".join(sections)

    def _encode_buckets(self, delta: Array) -> bytes:
        """The count of buckets, their values, and the stream of symbols: 0 for no bucket. `delta`: (n, m) float32."""
        table = self.table
        if table is None:
            extremes: Extremes = {}
            _add_extremes(delta, extremes)
            table = self._largest_buckets(extremes)
        plane = _symbols(table)[_keys(delta)].reshape(-1)
        head = bytes([len(table)]) + b"".join(_ENTRY.pack(value) for _, value in table)
        return head + self._encode_symbols(plane, delta.shape[1])

    def _encode_symbols(self, plane: Array, columns: int) -> bytes:
        """The kind of the stream and the stream. `plane`: (n * columns,) uint8."""
        if self.coder == "context":
            return bytes([_CONTEXT]) + symbol_coder.encode(plane.astype(np.int32), columns)
        out = thread_buffer("lc", plane.size + 64)
        if self.coder == "packed":
            kind, size = streams.encode(plane, out, 0, streams.LEVELS["max"], always_try=True)
        else:
            size = lossless.entropy_code(plane, out)
            kind = HUFFMAN if size > 1 else CONSTANT if size else STORED
        return bytes([kind]) + (out[:size] if kind else plane).tobytes()

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        source, decoded = ByteReader(data), {}
        for name in state_types.in_order(form):
            (kind,), content = source.take(1), source.part()
            if wanted is not None and name not in wanted:
                continue
            if kind == EXACT:
                decoded[name] = Planes().decode(content, shape, form[name], None)
            elif kind == BUCKETS and name in before and state_types.is_approximated(form[name]):
                if before[name].shape != shape:
                    raise CodecError(f"a chunk of lc needs the {name} before it in its shape")
                weights = self._decode_buckets(content, before[name], state_types.matrix_shape(shape))
                decoded[name] = state_types.to_state_dtype(weights, form[name], shape)
            else:
                raise CodecError(f"a chunk of lc has an unknown kind for {name}")
        source.end()
        return {name: decoded[name] for name in form if name in decoded}

    def _decode_buckets(self, content: bytes, before: Array, matrix: tuple[int, int]) -> Array:
        """The weights after a change: (n, m) float32. `before`: the weights before, any shape; `matrix`: (n, m)."""
        source = ByteReader(content)
        (count,) = source.take(1)
        table = [0.0] + [_ENTRY.unpack(source.take(_ENTRY.size))[0] for _ in range(count)]
        (kind,) = source.take(1)
        at, size = 2 + _ENTRY.size * count, matrix[0] * matrix[1]
        if kind == _CONTEXT:
            symbols = symbol_coder.decode(content[at:], size, matrix[1])
        else:
            symbols = streams.decode(kind, np.frombuffer(content, np.uint8), at, len(content), size, "lc")
        if symbols.size and not 0 <= int(symbols.min()) <= int(symbols.max()) <= count:
            raise CodecError("a chunk of lc has a symbol without a bucket")
        with np.errstate(over="ignore", invalid="ignore"):
            weights: Array = state_types.to_float32(before) + np.array(table, np.float32)[symbols].reshape(matrix)
        return weights


def _delta(change: StatePair) -> Array | None:
    """The change of the weights, (n, m) float32; None if there are no weights before, or a change is not finite."""
    name = state_types.weights_of(change.after)
    if name is None or name not in change.before or not state_types.is_approximated(change.after[name].dtype):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        delta: Array = state_types.to_float32(change.after[name]) - state_types.to_float32(change.before[name])
    return delta if delta.size and np.isfinite(delta).all() else None


def _keys(delta: Array) -> Array:
    """The bucket of each change, its sign and exponent: (n, m) uint32. `delta`: (n, m) float32."""
    return np.ascontiguousarray(delta).view(np.uint32) >> np.uint32(23)


def _symbols(table: tuple[tuple[int, float], ...]) -> Array:
    """The symbol of each bucket: (512,) uint8.

    Changes with a larger exponent than the samples have go into the largest bucket of their sign. Without that, a
    large error could remain in all later deltas, because their samples may not contain it either.
    """
    symbols = np.zeros(512, np.uint8)
    for sign in (0, 256):
        entries = sorted((key, symbol) for symbol, (key, _) in enumerate(table, 1) if key & 256 == sign)
        for key, symbol in entries:
            symbols[key] = symbol
        if entries:
            symbols[entries[-1][0] : sign + 256] = entries[-1][1]
    return symbols


def _add_extremes(delta: Array, extremes: Extremes) -> None:
    """Widen the extremes by those of a change, (n, m) float32."""
    keys = _keys(delta)
    for key in np.unique(keys).tolist():
        if key & 255:
            members = delta[keys == key]
            low, high = extremes.get(key, (np.inf, -np.inf))
            extremes[key] = min(low, float(members.min())), max(high, float(members.max()))
