"""Give values to other programs without a copy: tensors of torch, DLPack, and files that are mapped into memory.

Torch is imported when a value is given to it, and not before.
"""

from __future__ import annotations

import ctypes
import mmap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.files import open_to_read, unreadable
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.open_file import LocalFile

if TYPE_CHECKING:
    import torch

    TorchTensor: TypeAlias = torch.Tensor

Array = np.ndarray[Any, DType]

_DLPACK_CODES = {
    "bfloat16": 4,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
"""Type codes of DLPack 1.1 for the types that NumPy cannot export."""
_CAPSULES = {b"dltensor": 20, b"dltensor_versioned": 52}
"""The capsules that NumPy exports, and the offset of the type code in what they point to: dlpack.h on 64 bits."""


def from_torch(tensor: TorchTensor) -> Array:
    """Return the values of a tensor of torch as an array of the same shape and dtype. In CPU memory, both share it.

    Raises `UnsupportedError` for an element type that no checkpoint holds.
    """
    import torch

    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise UnsupportedError(f"no checkpoint holds elements of type {tensor.dtype}")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    values: Array = flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
    return values


def to_torch(values: Array) -> TorchTensor:
    """Return the tensor of torch that shares the memory of a writable array of any shape, with its strides and dtype.

    Raises `UnsupportedError` if torch is not installed, or has no such dtype.
    """
    try:
        import torch
    except ImportError as error:
        what = f"torch cannot be imported: {error}"
        raise UnsupportedError(what, hint="Install it, or take NumPy's arrays: np.asarray(parameter).") from error
    if not values.dtype.isnative:
        raise UnsupportedError(
            f"torch has no type for big-endian values: {values.dtype.str}",
            hint="Take NumPy's array and swap its bytes: np.asarray(parameter, '<f4').",
        )
    dtype = getattr(torch, values.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"torch {torch.__version__} has no type {values.dtype.name}",
            hint="Install a newer torch, or cast the weights: checkpoint.cast('fp32').",
        )
    if values.size == 0:
        return torch.empty(values.shape, dtype=dtype)  # with torch's strides: NumPy's are zeros
    # Torch refuses arrays of the types of `ml_dtypes`, but not their bits.
    bits = values if values.dtype.isbuiltin == 1 else values.view(f"i{values.dtype.itemsize}")
    return torch.from_numpy(bits).view(dtype)


def to_dlpack(values: Array, options: dict[str, Any]) -> Any:
    """Return a DLPack capsule that shares the memory of an array of any shape; `options` are those of `__dlpack__`.

    Raises `BufferError` for a dtype that DLPack lacks, for another device, and for `copy=False`: values are read.
    """
    given = {name: option for name, option in options.items() if option is not None}
    if given.pop("copy", None) is False:
        raise BufferError("the values are read from files, so they cannot be exported without a copy")
    code = _DLPACK_CODES.get(values.dtype.name)
    if code is None:
        return values.__dlpack__(**given)
    capsule = values.view(f"i{values.dtype.itemsize}").__dlpack__(**given)
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    kind = name(capsule)
    ctypes.c_uint8.from_address(pointer(capsule, kind) + _CAPSULES[kind]).value = code
    return capsule


class FilePiece(Protocol):
    """Values that lie in a file in C order without holes, at an aligned offset: any shape, dtype of NumPy or ours."""

    @property
    def path(self) -> Path: ...

    @property
    def offset(self) -> int: ...

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> DType: ...


class MappedFiles:
    """Files mapped into memory, each once: copy on write, so what changes an array never changes the file."""

    def __init__(self, identities: Identities | None = None) -> None:
        """Map only files that are still those of `identities`; of other paths, whatever file is there."""
        self._identities = identities
        self._files: dict[Path, mmap.mmap] = {}

    def array(self, piece: FilePiece) -> Array:
        """Return the values of a piece, an array of any shape and dtype, where they lie in the mapped file.

        Raises `CorruptError` if the file is too short or was replaced, `NotFoundError` if it cannot be read.
        """
        if piece.path not in self._files:
            self._files[piece.path] = _map_whole(piece.path, self._identities)
        file = self._files[piece.path]
        if piece.offset + piece.span > len(file):
            raise CorruptError(
                f"the file ends at byte {len(file)}, but a tensor reaches to byte {piece.offset + piece.span}",
                where=piece.path,
                hint="It was truncated, or is still being written: copy it again.",
            )
        return np.frombuffer(file, piece.dtype, prod(piece.shape), piece.offset).reshape(piece.shape)


def _map_whole(path: Path, identities: Identities | None) -> mmap.mmap:
    file = open_to_read(path, identities)
    assert isinstance(file, LocalFile)
    try:
        # Only pages that are changed take memory: none is reserved for the whole file.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(file.descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise unreadable(error, path) from error
    except ValueError as error:  # an empty file
        raise CorruptError(f"cannot be mapped: {error}", where=path, hint="It was truncated: copy it again.") from error
    finally:
        file.close()
