"""Write a state as encoded chunks: the choice of a codec, and the bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ckpt_codecs import Codec, CodecError, NotApplicable, candidate_codecs, from_config
from ckpt_codecs.base import Bytes, encode_bound
from ckpt_codecs.scratch import temporary_buffer, thread_buffer
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Array, FileBlob, FlatRangeBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.universal.entry import StateEntry
from ckpt_formats.universal.pack_file import ChunkAppender, PackFile

_MAX_RATIO = 0.99
"""Encoded bytes for each raw byte. Above it, the values are stored as they are."""
_MIN_BYTES = 64
"""Bytes of a state. For smaller states, the rows of the index alone need too much."""
ROW_NBYTES = 12
"""Bytes in the index of each encoded chunk: its length, and the checksum of its bytes."""

Passing = Callable[[Box, Array], None]
"""Receives the values of each chunk that is written, a vector, and their flat range."""


@dataclass(frozen=True)
class CodecChoice:
    """The codec for one state, and the chunks that were encoded already to choose it."""

    codec: Codec
    base: str | None
    coded: dict[int, Bytes] = field(default_factory=dict)
    """Encoded chunks by number, valid until this thread makes the next choice."""

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that were encoded already, with their rows in the index."""
        return sum(map(len, self.coded.values())) + ROW_NBYTES * len(self.coded)


def choose(parameter: Parameter, state: str, coding: EncodingOptions, transfer: Transfer) -> CodecChoice | None:
    """The codec for a state, chosen by two of its chunks; None if its values are better stored as they are."""
    tensor = parameter.states[state]
    count = Chunking.default(tensor.shape).count
    return choose_for(parameter, state, coding, transfer, sorted({0, count // 2})) if count else None


def choose_for(
    parameter: Parameter, state: str, coding: EncodingOptions, transfer: Transfer, indices: Sequence[int]
) -> CodecChoice | None:
    """The first codec that can encode these chunks, at level `max` the one with the smallest result.

    None if the result is not smaller than the values.
    """
    tensor = parameter.states[state]
    chunking = Chunking.default(tensor.shape)
    raw = sum(chunking.box(index).size for index in indices) * tensor.dtype.itemsize
    if raw < _MIN_BYTES:
        return None
    choices = []
    for number, codec in enumerate(_candidates(parameter, state, coding)):
        choice = CodecChoice(codec, _base_of(codec))
        source = _ChunkSource.of(parameter, state, choice)
        try:
            for position, index in enumerate(indices):
                values, base = source.fetch(index, transfer, counted=False)
                out = thread_buffer(f"tried/{number}/{position}", encode_bound(values.nbytes))
                choice.coded[index] = codec.encode_into(values, base, out)
        except NotApplicable:
            continue
        choices.append(choice)
        if coding.level != "max" or coding.codec is not None:
            break  # this codec is the best one or the user's own; the next ones are for states that it cannot encode
    smallest = min(choices, key=lambda choice: choice.nbytes, default=None)
    return smallest if smallest is not None and smallest.nbytes <= _MAX_RATIO * raw else None


def write_coded(
    out: PackFile,
    parameter: Parameter,
    state: str,
    choice: CodecChoice,
    check: bool,
    transfer: Transfer,
    passing: Passing | None = None,
) -> StateEntry:
    """Write the chunks of a state at the end of a pack.

    `passing` receives the values of each chunk, a vector, and their flat range. If `check`, each chunk is
    decoded again and compared. Raises `UnsupportedError` if the codec cannot encode a chunk.
    """
    tensor, digests = parameter.states[state], bytearray()
    source, chunks = _ChunkSource.of(parameter, state, choice), ChunkAppender(out)
    encoded = _encoded_chunks(source, choice, parameter, transfer, passing)
    with transfer.ahead(encoded, lambda chunk: chunk.index + 1 < source.chunking.count) as computed:
        for chunk in computed:
            if check:
                _check(choice, chunk, f"`{printable(parameter.name)}` {state}, chunk {chunk.index}")
            chunks.add(chunk.data)
            digests += xxhash.xxh3_128_digest(as_bytes(chunk.values).data)
    extent, coded = chunks.end()
    codec = choice.codec.config()
    return StateEntry(tensor.dtype.name, tensor.shape, bytes(digests), extent, codec, choice.base, coded)


def flat(tensor: Tensor) -> Tensor:
    """The tensor's elements in C order, as a vector: (size,), of the same dtype. Lazy."""
    blob = tensor.fragments[0].blob if len(tensor.fragments) == 1 and not tensor.replicas else None
    if isinstance(blob, FileBlob) and blob.shape == tensor.shape and blob.is_packed:
        return Tensor.of(blob.flat(0, tensor.size))
    return Tensor.of(FlatRangeBlob(tensor, 0, tensor.size))


def _candidates(parameter: Parameter, state: str, coding: EncodingOptions) -> Iterator[Codec]:
    tensor = parameter.states[state]
    own = () if coding.codec is None else (from_config(dict(coding.codec)),)
    for codec in (*own, *candidate_codecs(parameter.role, to_stored(state), tensor.dtype, coding.level)):
        if not codec.lossless:
            raise InvalidArgumentError(
                f"codec {codec.name} would change the values", where=f"tensor {printable(parameter.name)}"
            )
        name = _base_of(codec)
        base = None if name is None else parameter.states.get(name)
        if name is None or (base is not None and base is not tensor and base.shape == tensor.shape):
            yield codec


def _base_of(codec: Codec) -> str | None:
    """The state of the same parameter that a codec needs to decode, which codecs know by its stored name."""
    return None if codec.context is None else from_stored(codec.context)


@dataclass(frozen=True)
class _ChunkSource:
    """A state in chunks, and its codec's base, if it has one. Both are vectors."""

    values: Tensor
    base: Tensor | None
    chunking: Chunking

    @classmethod
    def of(cls, parameter: Parameter, state: str, choice: CodecChoice) -> "_ChunkSource":
        base = None if choice.base is None else flat(parameter.states[choice.base])
        tensor = parameter.states[state]
        return cls(flat(tensor), base, Chunking.default(tensor.shape))

    def box(self, index: int) -> Box:
        return self.chunking.box(index)

    def fetch(self, index: int, transfer: Transfer, counted: bool = True) -> tuple[Array, Array | None]:
        """The values of a chunk and of its base, each in the shape that the codec expects: (rows, columns) or (n,)."""
        box = self.box(index)
        form = self.chunking.chunk_shape(box.size)
        values = transfer.fetch(self.values, box, counted=counted).reshape(form)
        if self.base is None:
            return values, None
        return values, transfer.fetch(self.base, box, "base", counted=False).reshape(form)


@dataclass(frozen=True, slots=True)
class _EncodedChunk:
    index: int
    values: Array
    base: Array | None
    data: Bytes


def _encoded_chunks(
    source: _ChunkSource, choice: CodecChoice, parameter: Parameter, transfer: Transfer, passing: Passing | None
) -> Iterator[_EncodedChunk]:
    """The chunks of a state."""
    for index in range(source.chunking.count):
        values, base = source.fetch(index, transfer)
        if passing is not None:
            passing(source.box(index), values.reshape(-1))
        data = choice.coded.pop(index, None) or _encode(choice, values, base, parameter, transfer)
        yield _EncodedChunk(index, values, base, data)


def _encode(choice: CodecChoice, values: Array, base: Array | None, parameter: Parameter, transfer: Transfer) -> Bytes:
    # Not a thread's buffer: a spare worker may encode for another file before this chunk is written.
    out = transfer.buffer("coded", encode_bound(values.nbytes))
    try:
        return choice.codec.encode_into(values, base, out)
    except NotApplicable as error:  # although it could encode the chunks by which it was chosen
        raise UnsupportedError(
            f"codec {choice.codec.name}: {error}", where=f"tensor {printable(parameter.name)}"
        ) from None


def _check(choice: CodecChoice, chunk: _EncodedChunk, where: str) -> None:
    values = chunk.values
    with temporary_buffer(values.nbytes) as raw:
        try:
            choice.codec.decode_into(chunk.data, raw.view(values.dtype).reshape(values.shape), chunk.base)
            equal = _same_bits(raw, as_bytes(values))
        except CodecError:
            equal = False
    if not equal:
        raise RuntimeError(f"codec {choice.codec.name} does not decode to the values that it encoded: {where}")


def _same_bits(a: Array, b: Array) -> bool:
    """Whether two vectors of uint8 are equal. Compares 8 bytes at once, which takes half the time."""
    even = a.size & ~7
    with temporary_buffer(even // 8) as differs:
        unequal = np.not_equal(a[:even].view(np.uint64), b[:even].view(np.uint64), out=differs.view(np.bool_))
        return not unequal.any() and bool(np.array_equal(a[even:], b[even:]))
