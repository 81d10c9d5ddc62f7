"""Give values to other programs without a copy: tensors of torch, DLPack, and files that are mapped into memory.

Torch is imported when a value is given to it, and not before.
"""

from __future__ import annotations

import ctypes
import mmap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import open_to_read, unreadable
from ckpt_formats.core.geometry import block_of_key
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.open_file import LocalFile
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import FileBlob, Tensor, checked_read

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


def block_to_torch(
    tensor: Tensor, key: Any, files: MappedFiles | None = None, identities: Identities | None = None
) -> TorchTensor:
    """Return a block of a tensor, as NumPy's basic indexing selects it, as a tensor of torch.

    Its memory is where the values lie in `files`, if they lie there in one piece; else it is new, and only this block
    is read. Raises as `Tensor.torch`, and `CorruptError` for a file that is not the one of `identities`.
    """
    box, remainder = block_of_key(key, tensor.shape)
    mapped = None if files is None else files.array(tensor)
    values = checked_read(tensor.crop(box), identities) if mapped is None else mapped[box.index]
    return to_torch(values[(*remainder, ...)])


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


def mapped_block(tensor: Tensor, key: Any, files: MappedFiles) -> Array | None:
    """A block of a tensor, as NumPy's basic indexing selects it, where its values lie in `files`: read-only.

    The array has any shape and dtype, those of the block. None if the tensor does not lie there in one piece. Raises
    as `Tensor.mapped`.
    """
    box, remainder = block_of_key(key, tensor.shape)
    mapped = files.array(tensor)
    if mapped is None:
        return None
    values = mapped[box.index][(*remainder, ...)]
    values.flags.writeable = False
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


class MappedFiles:
    """Files mapped into memory, each once: copy on write, so what changes an array never changes the file."""

    def __init__(self, identities: Identities | None = None) -> None:
        """Map only files that are still those of `identities`; of other paths, whatever file is there."""
        self._identities = identities
        self._files: dict[Path, mmap.mmap] = {}

    def array(self, tensor: Tensor) -> Array | None:
        """Return the values where they lie in a mapped file, of any shape and dtype of NumPy or `ml_dtypes`.

        None if they do not lie in one piece of a local file.

        Raises `CorruptError` if the file is too short or was replaced, `NotFoundError` if it cannot be read.
        """
        blob = _packed_blob(tensor)
        if blob is None:
            return None
        if blob.path not in self._files:
            self._files[blob.path] = _map_whole(blob.path, self._identities)
        file = self._files[blob.path]
        if blob.offset + blob.span > len(file):
            raise CorruptError(
                f"the file ends at byte {len(file)}, but a tensor reaches to byte {blob.offset + blob.span}",
                where=blob.path,
                hint="It was truncated, or is still being written: copy it again.",
            )
        return np.frombuffer(file, blob.dtype, prod(blob.shape), blob.offset).reshape(blob.shape)


def _packed_blob(tensor: Tensor) -> FileBlob | None:
    """The one aligned piece of a local file that has all values of a tensor; None if there is no such piece."""
    for problem in tensor.problems():
        raise IncompleteError(str(problem))
    if tensor.replicas or not tensor.size or len(tensor.fragments) != 1:
        return None
    blob = tensor.fragments[0].blob
    if not isinstance(blob, FileBlob) or is_remote(blob.path) or not blob.is_packed:
        return None
    return None if blob.offset % blob.dtype.alignment else blob


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
