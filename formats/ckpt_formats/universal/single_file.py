"""A universal checkpoint in one file: a pack whose last entries are the index and the manifest. See docs/format.md."""

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import open_regular, read_range
from ckpt_formats.core.open_file import stream_nbytes

SUFFIX = ".ucp"
"""The end of the name of such a file."""
_HEAD_NBYTES = 512
_PLACE = r'"(\d{1,19}) (\d{1,19})"'
_HEAD = re.compile(
    r'\{"__metadata__":\{"ckpt":"universal 1","index":%s,"manifest":%s(?:,"original":%s)?\}' % ((_PLACE,) * 3)
)


@dataclass(frozen=True)
class FileRange:
    """Bytes of the file."""

    path: Path
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def read(self) -> bytes:
        """The bytes. Raises `CorruptError` if the file ends before."""
        return read_range(self.path, self.offset, self.nbytes)


@dataclass(frozen=True)
class LastEntries:
    """Where the index, the manifest, and the form of the original file are in the file."""

    index: FileRange
    manifest: FileRange
    original: FileRange | None

    @property
    def begin(self) -> int:
        """The first byte of them, where the states end."""
        return self.index.offset if self.original is None else self.original.offset

    def read_index_and_manifest(self) -> tuple[bytes, bytes]:
        """The bytes of both, with one read, because a read of a store takes long. Raises as `FileRange.read`."""
        data = FileRange(self.index.path, self.index.offset, self.manifest.end - self.index.offset).read()
        return data[: self.index.nbytes], data[self.index.nbytes :]


def is_single(path: Path) -> bool:
    """Whether a checkpoint at this path is one file, which its name states."""
    return path.name.endswith(SUFFIX)


def last_entries(path: Path) -> LastEntries:
    """Read the first bytes of a file. Raises `CorruptError` unless the entries follow one another up to its end."""
    with open_regular(path) as file:
        nbytes, head = stream_nbytes(file), file.read(_HEAD_NBYTES)
    match = _HEAD.match(head[8:].decode("latin-1"))
    if match is None:
        raise CorruptError("not a universal checkpoint in one file, or its first bytes are damaged", where=path)
    numbers = [None if number is None else int(number) for number in match.groups()]
    index, manifest, original = (
        None if offset is None or length is None else FileRange(path, offset, length)
        for offset, length in zip(numbers[::2], numbers[1::2], strict=True)
    )
    assert index is not None
    assert manifest is not None
    in_order = index.end == manifest.offset and (original is None or original.end == index.offset)
    if not in_order or manifest.end != nbytes:
        raise CorruptError(
            f"the file has {nbytes:,} bytes, its first bytes describe {manifest.end:,}",
            where=path,
            hint="It was truncated, appended to or damaged.",
        )
    return LastEntries(index, manifest, original)
