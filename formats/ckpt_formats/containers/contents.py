"""What a file is by its first bytes, if it is none that ckpt reads: imported for those only."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ckpt_formats.containers.file_starts import is_npz, is_stable_baselines
from ckpt_formats.core.errors import CkptError, CorruptError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

_AS_SAFETENSORS = "Save it there as safetensors, which is read."
_FROM_NUMPY = "Save the arrays as safetensors: safetensors.numpy.save_file."
_UNPACK = "Unpack it, and name the file or folder of the checkpoint in it."
_DOWNLOAD = "Download the file again, and look at the address."


class Content(NamedTuple):
    """What a file is, if it is nothing that ckpt reads: a sentence about it, and what to do."""

    what: str
    hint: str
    error: type[CkptError] = UnsupportedError


_KNOWN: tuple[tuple[re.Pattern[bytes], Content], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), content)
    for pattern, content in (
        (
            rb"\s*version https://git-lfs",
            Content("is a pointer of Git LFS, not the file itself", "Fetch the file: git lfs pull", CorruptError),
        ),
        (rb"\s*<(!doctype )?html", Content("is a page of HTML, not the file itself", _DOWNLOAD, CorruptError)),
        (
            rb"\s*<\?xml",
            Content(
                "is an answer in XML, as stores give, not the file itself", "Download the file again.", CorruptError
            ),
        ),
        (
            rb"\0{64}",
            Content(
                "begins with zeros, as files do after a crash or during a download",
                "Copy or download the file again.",
                CorruptError,
            ),
        ),
        (rb"\x1f\x8b", Content("is a file compressed by gzip, which is not read", "Unpack it: gunzip")),
        (rb"\x28\xb5\x2f\xfd", Content("is a file compressed by zstd, which is not read", "Unpack it: unzstd")),
        (rb"\xfd7zXZ\0", Content("is a file compressed by xz, which is not read", "Unpack it: unxz")),
        (rb"BZh[1-9]1AY&SY", Content("is a file compressed by bzip2, which is not read", "Unpack it: bunzip2")),
        (rb"\x04\x22\x4d\x18", Content("is a file compressed by lz4, which is not read", "Unpack it: unlz4")),
        (rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", Content("is an archive, which is not read", _UNPACK)),
        (rb".{257}ustar", Content("is a tar archive, which is not read", _UNPACK)),
        (
            rb"\x89HDF\r\n\x1a\n",
            Content("holds HDF5, as Keras and TensorFlow save weights, which is not read", _AS_SAFETENSORS),
        ),
        (
            rb"(ggml|ggjt|ggla|lmgg|tjgg)",
            Content("holds weights of llama.cpp (GGML), which are not read", _AS_SAFETENSORS),
        ),
        (
            rb"\x93NUMPY",
            Content("is an array of NumPy, which is not read", _FROM_NUMPY),
        ),
        (rb".{4}TFL3", Content("is a model of TensorFlow Lite, which is not read", _AS_SAFETENSORS)),
        (rb"PAR1", Content("is a table of Parquet, not a checkpoint", "Name the file of the model.")),
        (
            rb"SQLite format 3\0",
            Content("is a database of SQLite, not a checkpoint", "Name the file of the model."),
        ),
        (
            rb"\x08[\x01-\x20](\x12.(pytorch|tf2onnx|keras2onnx|skl2onnx|onnx)|\x12\0|:.{1,4}\n)",
            Content("is a graph of ONNX, which is not read", _AS_SAFETENSORS),
        ),
    )
)


def foreign_content(head: bytes) -> Content | None:
    """What a file that begins with `head` is; None if ckpt may read it, or if it is unknown."""
    return next((content for pattern, content in _KNOWN if pattern.match(head)), None)


def check_content(head: bytes, path: Path) -> None:
    """Raise an error if a file is by its first bytes something that ckpt does not read, or only stands for a file."""
    if (content := foreign_content(head)) is not None:
        raise content.error(content.what, where=path, hint=content.hint)


def other_ending(path: Path, kind: str) -> Notice:
    """The notice about a file that is read as what its content is, against its ending. `kind`: such as `torch`."""
    text = f"{printable(path.name)} is read as {kind}, by its content; its ending is that of another format"
    return Notice(text, weight=Weight.UNSURE)


def archive_kind(names: Collection[str], compressed: bool = False) -> Content | None:
    """What a zip archive with members of these names is, if not a file of torch.save; None if that is unknown."""
    inner = {name.partition("/")[2] or name for name in names}
    if is_npz(names) and compressed:
        return Content(
            "holds arrays of NumPy that another method than deflate compresses, which are not read",
            "Save them with numpy.savez or numpy.savez_compressed.",
        )
    if is_npz(names):
        return Content("holds arrays of NumPy (.npz), and is not a file of torch.save", "Name this file by itself.")
    if {".data/extern_modules", ".data/python_version"} & inner:
        return Content(
            "is a package of torch.package, which holds code, and is not read",
            "Load it with torch.package.PackageImporter, and save the model's state_dict() with torch.save.",
        )
    if is_stable_baselines(names):
        return Content(
            "is a model of Stable-Baselines3, which is not read",
            "Unpack it (unzip), and name policy.pth: it is a file of torch.save.",
        )
    if any(name.endswith(".weights.h5") for name in names):
        return Content("is a model of Keras, which is not read", _AS_SAFETENSORS)
    if any(name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")) for name in names):
        return Content("is a zip archive of other files, which is not read", _UNPACK)
    return None
