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
from ckpt_codecs.lossy import state_types as forms
from ckpt_codecs.lossy import symbol_coder as symbols
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

EXACT, BUCKETS = 0, 1
CODERS = ("huffman", "packed", "context")
SCOPES = ("parameter", "state")
_ENTRY = Struct("<f")
_CONTEXT = 255
"""The kind of a stream that the range coder made; others are those of `ckpt_codecs.format_ids`."""
Extremes = dict[int, tuple[float, float]]
"""Of each bucket (sign and exponent, the upper nine bits of a float32) the least and the largest value."""


@dataclass(frozen=True)
class LcCheckpoint(DeltaCodec):
    """Changes of the weights by sign and exponent; those of the 2^bits - 1 largest exponents are kept, others dropped.

    A bucket stands for the middle between its least and largest change. Everything but the
    weights is exact. `scope`: buckets are chosen for a parameter or for the whole
    state, as published. `coder`: `huffman`, as published, needs a bit for each weight at
    least; `packed` and `context` code the same symbols below it. `table` is what
    `fit` or `survey` found: buckets and what they stand for.
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
                raise CodecError("a table of lc is pairs of a bucket and a number") from None
            if len(table) >= 1 << self.bits or not all(0 <= key < 512 and abs(value) < 1e39 for key, value in table):
                raise CodecError(f"a table of lc has at most {(1 << self.bits) - 1} buckets")
            object.__setattr__(self, "table", table)

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> "LcCheckpoint":
        """With one table for the whole state, if that is the scope. Samples should be all chunks."""
        return self._with_table(change for _, change in samples) if self.scope == "state" else self

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "LcCheckpoint":
        return self if self.table is not None else self._with_table(changes())

    def _with_table(self, changes: Iterable[StatePair]) -> "LcCheckpoint":
        found: Extremes = {}
        for change in changes:
            delta = _delta(change)
            if delta is not None:
                _gather(delta, found)
        return replace(self, table=self._promoted(found))

    def _promoted(self, found: Extremes) -> tuple[tuple[int, float], ...]:
        """The buckets of the largest exponents, of one sign before those of the other."""
        best = sorted(found, key=lambda key: (-(key & 255), key >> 8))[: (1 << self.bits) - 1]
        return tuple((key, float(np.float32((found[key][0] + found[key][1]) / 2))) for key in best)

    def encode(self, change: StatePair) -> bytes:
        form = {name: array.dtype for name, array in change.after.items()}
        forms.check(form)
        delta, weights = _delta(change), forms.weights_of(form)
        made = []
        for name in forms.in_order(form):
            data = None
            if name == weights and delta is not None:
                data = self._buckets(delta)
                state = self._state(data, change.before[name], delta.shape)
                data = data if np.isfinite(state).all() else None
            kind = EXACT if data is None else BUCKETS
            made.append(
                bytes([kind])
                + length_prefixed(bytes(Planes().encode(change.after[name], None)) if data is None else data)
            )
        return b"".join(made)

    def _buckets(self, delta: Array) -> bytes:
        """How many buckets, what each stands for, the stream of symbols: 0 for none."""
        table = self.table
        if table is None:
            found: Extremes = {}
            _gather(delta, found)
            table = self._promoted(found)
        plane = _symbols(table)[_keys(delta)].reshape(-1)
        head = bytes([len(table)]) + b"".join(_ENTRY.pack(value) for _, value in table)
        return head + self._coded(plane, delta.shape[1])

    def _coded(self, plane: Array, columns: int) -> bytes:
        if self.coder == "context":
            return bytes([_CONTEXT]) + symbols.encode(plane.astype(np.int32), columns)
        out = thread_buffer("lc", plane.size + 64)
        if self.coder == "packed":
            kind, held = streams.encode(plane, out, 0, streams.LEVELS["max"], always_try=True)
        else:
            held = lossless.entropy_code(plane, out)
            kind = HUFFMAN if held > 1 else CONSTANT if held else STORED
        return bytes([kind]) + (out[:held] if kind else plane).tobytes()

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        source, made = ByteReader(data), {}
        for name in forms.in_order(form):
            (kind,), held = source.take(1), source.piece()
            if wanted is not None and name not in wanted:
                continue
            if kind == EXACT:
                made[name] = Planes().decode(held, shape, form[name], None)
            elif kind == BUCKETS and name in before and forms.is_approximated(form[name]):
                made[name] = self._state(held, before[name], forms.matrix_shape(shape))
            else:
                raise CodecError(f"a chunk of lc holds {name} in no way that is known")
        source.end()
        return {name: made[name] for name in form if name in made}

    def _state(self, held: bytes, before: Array, matrix: tuple[int, int]) -> Array:
        source = ByteReader(held)
        (many,) = source.take(1)
        table = [0.0] + [_ENTRY.unpack(source.take(_ENTRY.size))[0] for _ in range(many)]
        (kind,) = source.take(1)
        at, size = 2 + _ENTRY.size * many, matrix[0] * matrix[1]
        if kind == _CONTEXT:
            found = symbols.decode(held[at:], size, matrix[1])
        else:
            found = streams.decode(kind, np.frombuffer(held, np.uint8), at, len(held), size, "lc")
        if found.size and not 0 <= int(found.min()) <= int(found.max()) <= many:
            raise CodecError("a chunk of lc has a symbol without a bucket")
        with np.errstate(over="ignore", invalid="ignore"):
            new = forms.to_float32(before) + np.array(table, np.float32)[found].reshape(matrix)
        return forms.to_state_dtype(new, before.dtype, before.shape)


def _delta(change: StatePair) -> Array | None:
    """By how much the weights changed; None if nobody can say in finite float32."""
    name = forms.weights_of(change.after)
    if name is None or name not in change.before or not forms.is_approximated(change.after[name].dtype):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        delta: Array = forms.to_float32(change.after[name]) - forms.to_float32(change.before[name])
    return delta if delta.size and np.isfinite(delta).all() else None


def _keys(delta: Array) -> Array:
    """Sign and exponent of each change."""
    return np.ascontiguousarray(delta).view(np.uint32) >> np.uint32(23)


def _symbols(table: tuple[tuple[int, float], ...]) -> Array:
    """The symbol of each bucket. Changes larger than any in the samples go with the largest of their sign.

    Else what is off by much would stay so for ever, since a later delta's samples need not have it either.
    """
    made = np.zeros(512, np.uint8)
    for sign in (0, 256):
        own = sorted((key, symbol) for symbol, (key, _) in enumerate(table, 1) if key & 256 == sign)
        for key, symbol in own:
            made[key] = symbol
        if own:
            made[own[-1][0] : sign + 256] = own[-1][1]
    return made


def _gather(delta: Array, found: Extremes) -> None:
    keys = _keys(delta)
    for key in np.unique(keys).tolist():
        if key & 255:
            members = delta[keys == key]
            least, most = found.get(key, (np.inf, -np.inf))
            found[key] = min(least, float(members.min())), max(most, float(members.max()))
