"""Arrays of NumPy in one file: `.npz` as `numpy.savez`, MLX and JAX programs write it. Read, not written.

It is a zip archive of stored members, each with a header and plain values. A pickle in it (an array of objects) is
refused, never read.
"""

from pathlib import Path

from ckpt_formats.containers.file_starts import HEAD_NBYTES, ZIP, is_npz
from ckpt_formats.containers.npy import header_nbytes, parse_header
from ckpt_formats.containers.torchfile.file_window import Window
from ckpt_formats.containers.torchfile.zip_archive import Archive, read_members
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter, SourceFile
from ckpt_formats.core.claims import MAX_NAMES
from ckpt_formats.core.errors import CkptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.tensor import FileBlob, Tensor, c_strides

_SUFFIX, _MEMBER = ".npz", ".npy"
_START = 12


class NumPy(Format):
    name = "numpy"
    summary = "arrays of NumPy: an .npz file of numpy.savez"

    def detect(self, path: Path) -> bool:
        try:
            if not path.is_file():
                return False
            with open_regular(path) as file:
                head = file.read(HEAD_NBYTES)
        except (CkptError, OSError):
            return False
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return ZIP.match(head) is not None and (path.suffix.lower() == _SUFFIX or name.endswith(_MEMBER.encode()))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        with Window(path) as window:
            archive = read_members(window)
            names = archive.directory.names
            if not is_npz(names):
                raise UnsupportedError("holds other files than arrays of NumPy", where=path)
            if len(names) > MAX_NAMES:
                raise UnsafeError(f"has {len(names):,} arrays", where=path)
            parameters = {}
            for name in names:
                key = name.removesuffix(_MEMBER)
                parameters[key] = Parameter(key, "parameter", {MODEL: _tensor(archive, name, window)})
        return Checkpoint(
            path=path,
            origin=Origin("numpy"),
            parameters=parameters,
            files=(SourceFile(path, path.stat().st_size, "all"),),
            seals=archive.seals(),
        )


def _tensor(archive: Archive, name: str, window: Window) -> Tensor:
    """The array of a member; its values are not read."""
    start, nbytes = archive.place(name)
    where = f"{archive.path} ({name})"
    length = header_nbytes(window.at(start, min(nbytes, _START)), where)
    header = parse_header(window.at(start, min(nbytes, length)), nbytes, where)
    shape, itemsize = header.shape, header.dtype.itemsize
    strides = c_strides(shape, itemsize)
    if header.is_fortran:
        strides = tuple(reversed(c_strides(tuple(reversed(shape)), itemsize)))
    seal = archive.seal(archive.index[name])
    return Tensor.of(FileBlob(archive.path, start + header.begin, shape, header.dtype, strides, seal))
