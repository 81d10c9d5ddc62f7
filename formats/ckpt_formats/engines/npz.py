"""Arrays of NumPy in one file: `.npz` as `numpy.savez`, MLX and JAX programs write it. Read, not written.

It is a zip archive of members, each with a header and plain values. Members that `numpy.savez_compressed` compressed
are decoded once when the file is opened, never to more bytes than the archive states, and compared with their
checksums. A pickle in it (an array of objects) is refused, never read.
"""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.compressed_range import DecompressedBlob, DeflateDecoder, Frame
from ckpt_formats.containers.file_starts import HEAD_NBYTES, ZIP, is_npz
from ckpt_formats.containers.npy import header_nbytes, parse_header
from ckpt_formats.containers.torchfile.file_window import Window
from ckpt_formats.containers.torchfile.zip_archive import Archive, read_members
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter, SourceFile
from ckpt_formats.core.claims import MAX_NAMES
from ckpt_formats.core.errors import CkptError, UnsafeError, UnsupportedError, at_tensor
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import FileBlob, Tensor, c_strides
from ckpt_formats.core.text import printable

_SUFFIX, _MEMBER = ".npz", ".npy"
_START = 12


class NumPy(Format):
    name = "numpy"
    summary = "arrays of NumPy: an .npz file of numpy.savez or numpy.savez_compressed"

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
            archive = read_members(window, deflated=True)
            names = archive.directory.names
            if not is_npz(names):
                raise UnsupportedError("holds other files than arrays of NumPy", where=path)
            if len(names) > MAX_NAMES:
                raise UnsafeError(f"has {len(names):,} arrays", where=path)
            parameters, seals = {}, list[Seal]()
            for name in names:
                key, nbytes = name.removesuffix(_MEMBER), archive.packed(name)
                frame = None if nbytes is None else _frame(archive, name, nbytes)
                if frame is not None and frame.seal is not None:
                    seals.append(frame.seal)
                tensor = _stored(archive, name, window) if frame is None else _compressed(frame, name)
                parameters[key] = Parameter(key, "parameter", {MODEL: tensor})
        return Checkpoint(
            path=path,
            origin=Origin("numpy"),
            parameters=parameters,
            files=(SourceFile(path, path.stat().st_size, "all"),),
            seals=(*archive.seals(), *seals) if seals else archive.seals(),
        )


def _stored(archive: Archive, name: str, window: Window) -> Tensor:
    """The array of a member that is stored as it is; its values are not read."""
    start, nbytes = archive.place(name)
    raw = _array(window, start, nbytes, archive.path, name)
    return Tensor.of(replace(raw, seal=archive.seal(archive.index[name])))


def _frame(archive: Archive, name: str, nbytes: int) -> Frame:
    """A member of `nbytes` compressed bytes, decoded once. Raises `CorruptError` if it is not what was compressed."""
    start, length = archive.place(name)
    with at_tensor(printable(name)):
        frame = Frame(archive.path, start, nbytes, length, DeflateDecoder, name)
        if (frame.length, frame.crc) != (length, archive.crc(name)):
            raise frame.corrupt("what it decodes to does not match its checksum")
    return frame


def _compressed(frame: Frame, name: str) -> Tensor:
    """The array of a compressed member."""
    return Tensor.of(DecompressedBlob(frame, _array(frame, 0, frame.length, frame.path, name)))


def _array(source: Window | Frame, start: int, nbytes: int, path: Path, name: str) -> FileBlob:
    """The values of an array of NumPy, which has `nbytes` bytes from `start` on. They are not read."""
    where = f"{path} ({name})"
    length = header_nbytes(source.at(start, min(nbytes, _START)), where)
    header = parse_header(source.at(start, min(nbytes, length)), nbytes, where)
    shape, itemsize = header.shape, header.dtype.itemsize
    strides = c_strides(shape, itemsize)
    if header.is_fortran:
        strides = tuple(reversed(c_strides(tuple(reversed(shape)), itemsize)))
    return FileBlob(path, start + header.begin, shape, header.dtype, strides)
