"""The safetensors container: a JSON header, then the tensors' bytes (spec: huggingface/safetensors, README).

A file has three parts: the length of the header (8 bytes, little-endian); the header,
which maps each name to dtype, shape and a range of the data; the data, without gaps.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from ckpt_formats.containers.file_starts import HEAD_NBYTES, PICKLE, SAFETENSORS, ZIP
from ckpt_formats.core.claims import MAX_HEADER
from ckpt_formats.core.dtypes import DTYPES, NAMES, SAFETENSORS_TAGS, DType
from ckpt_formats.core.errors import CkptError, CorruptError, UnsupportedError
from ckpt_formats.core.files import open_regular, unreadable
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.open_file import stream_nbytes
from ckpt_formats.core.tensor import FileBlob
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import brief
from ckpt_formats.core.values import is_natural as is_natural

SUFFIX = ".safetensors"

_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Element types of less than one byte, and their bits per element. Elements are packed without gaps, as in torch."""

_BY_TAG: dict[str, DType] = {tag: DTYPES[name] for name, tag in SAFETENSORS_TAGS.items()}


@dataclass(frozen=True)
class SafetensorsFile:
    """The header of one file."""

    path: Path
    nbytes: int
    tensors: Mapping[str, FileBlob]
    metadata: Mapping[str, str]
    packed: tuple[str, ...] = ()
    """Names of tensors with several elements per byte. They are read as uint8, with a shorter last axis."""


@dataclass(frozen=True)
class TensorSlot:
    """The position of one tensor in a new file: its bytes begin at byte `offset` of the data."""

    name: str
    dtype: DType
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors by its content; by its ending if the content is nothing else. Raises
    `CkptError` of a store only."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_NBYTES)
    except CkptError:
        return path.suffix == SUFFIX and path.is_file()
    if SAFETENSORS.match(head):
        return True
    return path.suffix == SUFFIX and not ZIP.match(head) and not PICKLE.match(head)


def read_header(path: Path) -> SafetensorsFile:
    """The header of a file. All ranges lie inside the file, do not overlap, leave no gaps, and match the shapes.

    Raises `CorruptError`, and names the wrong entry; `UnsupportedError` for an unknown element type.
    """
    try:
        with open_regular(path) as file:
            nbytes = stream_nbytes(file)
            if nbytes == 0:
                raise CorruptError(
                    "the file is empty", where=path, hint="It was never written: copy or download it again."
                )
            length = struct.unpack("<Q", file.read(8))[0] if nbytes >= 8 else -1
            if not 2 <= length <= min(nbytes - 8, MAX_HEADER):
                file.seek(0)
                head = file.read(HEAD_NBYTES)
                from ckpt_formats.containers.contents import check_content  # only what is not read needs it

                check_content(head, path)
                if ZIP.match(head) or PICKLE.match(head):
                    raise UnsupportedError(
                        "is a zip archive or a pickle, as torch.save writes, not a file of safetensors",
                        where=path,
                        hint="Give it the ending .pt, or name the file itself.",
                    )
                raise CorruptError(
                    f"not a safetensors file: a header of {length} bytes in a file of {nbytes}",
                    where=path,
                    hint="It was damaged or cut off: copy or download it again.",
                )
            encoded = file.read(length)
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error
    header = parse_json_object(encoded, path)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptError("the header's __metadata__ is not a map of texts", where=path)
    base = 8 + length
    tensors = {name: _tensor(path, base, name, entry) for name, entry in header.items()}
    expected = base
    for name, blob in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].span)):
        if blob.offset != expected:
            raise CorruptError(
                f"entry `{name}` begins at byte {blob.offset}, expected {expected}: entries overlap or leave a gap",
                where=path,
            )
        expected += blob.span
    if expected > nbytes:
        raise CorruptError(
            f"the file is cut short: {nbytes:,} bytes, {expected:,} expected",
            where=path,
            hint="Copy or download it again.",
        )
    if expected < nbytes:
        raise CorruptError(
            f"the file has {nbytes:,} bytes, but its header describes {expected:,}",
            where=path,
            hint="Something was appended to it: copy or download it again.",
        )
    packed = tuple(name for name, entry in header.items() if entry["dtype"] in _PACKED)
    return SafetensorsFile(path, nbytes, tensors, metadata, packed)


def header_bytes(
    slots: Iterable[TensorSlot], metadata: Mapping[str, str], min_nbytes: int = 0, reference_style: bool = False
) -> bytes:
    """The header of a file, padded with spaces to a multiple of 64 bytes and to at least `min_nbytes` bytes.

    `reference_style` writes it as the safetensors library does: padded to a multiple of 8 bytes, and with
    characters outside ASCII not escaped. Raises `UnsupportedError` for what the format cannot store.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for slot in slots:
        tag = SAFETENSORS_TAGS.get(NAMES.get(slot.dtype, ""))
        if tag is None:
            raise UnsupportedError(
                f"tensor `{slot.name}`: safetensors has no element type {slot.dtype.name}",
                hint="`ckpt convert` leaves it out with --skip.",
            )
        if slot.name == "__metadata__":
            raise UnsupportedError("safetensors cannot store a tensor called `__metadata__`")
        entries[slot.name] = {
            "dtype": tag,
            "shape": list(slot.shape),
            "data_offsets": [slot.offset, slot.offset + slot.nbytes],
        }
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnsupportedError("safetensors cannot store a name with an unpaired surrogate") from None
    if not reference_style and not text.isascii():
        text = json.dumps(entries, separators=(",", ":")).encode()
    alignment = 8 if reference_style else 64
    text = text.ljust(max(min_nbytes, -(-(len(text) + 8) // alignment) * alignment) - 8)
    return struct.pack("<Q", len(text)) + text


def parse_json_object(raw: bytes, where: Path, finite: bool = False) -> dict[str, Any]:
    """A JSON object without duplicate keys. `finite`: also without floats that are not finite.

    Raises `CorruptError`.
    """
    parsed = parse_json(raw, where, finite)
    if not isinstance(parsed, dict):
        raise CorruptError("not a JSON object", where=where)
    return parsed


def parse_json(raw: bytes, where: Path, finite: bool = False) -> Any:
    """A JSON value without duplicate keys. `finite`: also without floats that are not finite. Raises `CorruptError`."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            raise ValueError("a key appears twice")
        return unique

    try:
        numbers: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
        return json.loads(raw.decode("utf-8"), object_pairs_hook=without_duplicates, **numbers)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not valid JSON: {error}", where=where) from None


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text:.40} is not a finite number")
    return value


def _packed(shape: list[int], bits: int, where: str) -> list[int]:
    """The shape in bytes of a tensor whose elements have fewer than 8 bits; flat if its rows end inside a byte."""
    if prod(shape) * bits % 8:
        raise CorruptError(
            f"shape {brief(shape, 80)} of elements of {bits} bits does not fill whole bytes", where=where
        )
    if shape and shape[-1] * bits % 8 == 0:
        return [*shape[:-1], shape[-1] * bits // 8]
    return [prod(shape) * bits // 8]


def _tensor(path: Path, base: int, name: str, entry: Any) -> FileBlob:
    where = f"{path}, entry `{name}`"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CorruptError("an entry needs dtype, shape and data_offsets", where=where)
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(is_natural, shape)):
        raise CorruptError(f"not a shape: {brief(shape, 80)}", where=where)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_natural, offsets)):
        raise CorruptError(f"not a range of bytes: {brief(offsets, 80)}", where=where)
    dtype = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if isinstance(tag, str) and tag in _PACKED:
        shape, dtype = _packed(shape, _PACKED[tag], where), DTYPES["uint8"]
    if dtype is None:
        raise UnsupportedError(
            f"tensor `{printable(name)}` has the element type {brief(tag)}, which is unknown",
            where=path,
            hint="Save it as another type, or without this tensor.",
        )
    start, stop = offsets
    if stop - start != prod(shape) * dtype.itemsize:
        raise CorruptError(f"range {start}:{stop} does not match shape {shape} of {dtype.name}", where=where)
    return FileBlob.packed(path, base + start, tuple(shape), dtype)
