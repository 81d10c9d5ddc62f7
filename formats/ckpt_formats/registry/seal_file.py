"""Seal files: checksums of all files of a checkpoint whose format has none, in a file of their own beside them.

`docs/format.md` specifies them. A seal file covers every byte of every file of the checkpoint: in ranges of a few MiB
that begin and end at the borders of tensors, each with its CRC-32. When a sealed checkpoint is opened, its files are
compared with the lengths in the seal file, small files without tensors are read and compared, and each tensor gets the
seal of the range that it is in, so that whatever reads it checks it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers import sealed_json
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seal_checks import seal_is_valid
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Blob, FileBlob, Fragment, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import is_natural
from ckpt_formats.registry.seal_places import IN_FOLDER, places_of_file

_FORMAT = "ckpt-seal"
_VERSION = 1
_MAX_NBYTES = 1 << 26
_MAX_RANGE = 1 << 50
_CHECKED_AT_OPENING = 16 << 20
"""Files without tensors up to this length are compared when the checkpoint is opened: configurations, indexes."""


@dataclass(frozen=True)
class SealedFile:
    """The checksums of a file: of ranges that follow one another and cover it."""

    ends: tuple[int, ...]
    """The byte after each range, ascending; the last one is the length of the file."""
    crcs: tuple[int, ...]
    """The CRC-32 of each range."""

    @property
    def nbytes(self) -> int:
        """The length of the file."""
        return self.ends[-1] if self.ends else 0

    def seals(self, path: Path, name: str) -> tuple[Seal, ...]:
        """The seals of the ranges, in order."""
        starts = (0, *self.ends)
        return tuple(
            Seal(path, start, end - start, "crc32", crc, f"{name}, bytes {start:,} to {end:,}")
            for start, end, crc in zip(starts, self.ends, self.crcs, strict=False)
        )


def to_bytes(files: Mapping[str, SealedFile]) -> bytes:
    """A seal file with the checksums of these files, by their names relative to where it is."""
    rows = [[name, list(one.ends), "".join(f"{crc:08x}" for crc in one.crcs)] for name, one in files.items()]
    return sealed_json.dump({"format": _FORMAT, "version": _VERSION, "files": rows})


def read(place: Path) -> dict[str, SealedFile]:
    """The files in a seal file, by name. Raises `CorruptError`, and `UnsupportedError` for a later version."""
    root = sealed_json.load(place, _MAX_NBYTES, "a seal file of ckpt")
    if root.get("format") != _FORMAT or not is_natural(root.get("version")):
        raise CorruptError("not a seal file of ckpt", where=place)
    if root["version"] > _VERSION:
        raise UnsupportedError(
            f"the seal file has version {root['version']}, and this ckpt reads version {_VERSION}",
            where=place,
            hint="Use a newer ckpt.",
        )
    rows = root.get("files")
    if not isinstance(rows, list) or not rows:
        raise CorruptError("the seal file names no files", where=place)
    files = dict[str, SealedFile]()
    for row in rows:
        name, one = _row(row, place)
        if name in files:
            raise CorruptError(f"the seal file names `{printable(name)}` twice", where=place)
        files[name] = one
    return files


def _row(row: Any, place: Path) -> tuple[str, SealedFile]:
    """A file of a seal file. Its name stays below the folder of the seal file."""
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str) or not isinstance(row[2], str):
        raise CorruptError("a line of the seal file is not a name, ends and checksums", where=place)
    name, ends, text = row
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        raise CorruptError(f"the seal file names `{printable(name)}`, which is not a file beside it", where=place)
    if not isinstance(ends, list) or not all(is_natural(end, _MAX_RANGE) for end in ends):
        raise CorruptError(f"the ranges of `{printable(name)}` in the seal file are not numbers", where=place)
    is_ascending = all(one < other for one, other in zip([0, *ends], ends, strict=False))
    if not is_ascending or len(text) != 8 * len(ends):
        raise CorruptError(f"the ranges of `{printable(name)}` in the seal file contradict each other", where=place)
    try:
        crcs = tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    except ValueError:
        raise CorruptError(
            f"the checksums of `{printable(name)}` in the seal file are not numbers", where=place
        ) from None
    return name, SealedFile(tuple(ends), crcs)


def with_seals(checkpoint: Checkpoint, path: Path, seal_files: Sequence[Path]) -> Checkpoint:
    """The checkpoint with the seals of these seal files. `path`: where it was opened.

    Raises `IncompleteError` if a sealed file is missing, `CorruptError` if it has another length, or if a small file
    without tensors does not fit its checksum.
    """
    own = {file.path for file in checkpoint.files} | {path}
    sealed, places = dict[Path, SealedFile](), dict[Path, Path]()
    for place in seal_files:
        named = _files_at(place, own, path)
        sealed |= named
        places |= dict.fromkeys(named, place)
    if not sealed:
        return checkpoint
    seals = {file: one.seals(file, file.name) for file, one in sealed.items()}
    starts = {file: [seal.offset for seal in own] for file, own in seals.items()}
    attached = _Attached(seals, starts)
    parameters = {
        name: replace(parameter, states={state: attached.tensor(one) for state, one in parameter.states.items()})
        for name, parameter in checkpoint.parameters.items()
    }
    for file, one in sealed.items():
        if file not in attached.used and one.nbytes <= _CHECKED_AT_OPENING:
            _check(seals[file], places[file])
    every = (*checkpoint.seals, *(seal for own in seals.values() for seal in own))
    return replace(checkpoint, parameters=parameters, seals=every)


def seal_of_file(path: Path) -> SealedFile | None:
    """The checksums of a single file, by the seal files that exist for it. Raises `CorruptError` as `with_seals`."""
    sealed = dict[Path, SealedFile]()
    for place in places_of_file(path):
        sealed |= _files_at(place, {path}, path)
    return sealed.get(path)


def _files_at(place: Path, own: Set[Path], path: Path) -> dict[Path, SealedFile]:
    """The files that a seal file is about, as far as they are of this checkpoint, compared by their lengths."""
    is_of_all = place.name == IN_FOLDER and place.parent == path
    result = dict[Path, SealedFile]()
    for name, one in read(place).items():
        file = place.parent / name
        if not is_of_all and file not in own:
            continue
        try:
            nbytes = file.stat().st_size
        except OSError:
            raise IncompleteError(
                f"is missing, although `{printable(place.name)}` has its checksums", where=file, hint=_hint(place)
            ) from None
        if nbytes != one.nbytes:
            raise CorruptError(
                f"has {nbytes:,} bytes, and had {one.nbytes:,} when it was sealed", where=file, hint=_hint(place)
            )
        result[file] = one
    return result


def _hint(place: Path) -> str:
    return f"Restore it from a copy. If you changed it on purpose: remove {printable(place.name)}, and seal again."


def _check(seals: Sequence[Seal], place: Path) -> None:
    """Read a file, and raise `CorruptError` if it does not fit its seal file, `place`."""
    with Reader(check=False) as reader:
        for seal in seals:
            if not seal_is_valid(seal, reader):
                raise CorruptError(
                    f"{printable(seal.label)}: does not fit its checksum in the seal file",
                    where=seal.path,
                    hint=_hint(place),
                )


@dataclass
class _Attached:
    """Gives tensors in sealed files the seals of the ranges that they are in."""

    seals: Mapping[Path, Sequence[Seal]]
    starts: Mapping[Path, Sequence[int]]

    def __post_init__(self) -> None:
        self.used = set[Path]()
        """The files of which a tensor was found."""

    def tensor(self, tensor: Tensor) -> Tensor:
        fragments = tensor.fragments
        if type(fragments) is tuple:
            fragments = tuple(Fragment(one.box, self._blob(one.blob)) for one in fragments)
        return Tensor(tensor.shape, tensor.dtype, fragments, tuple(map(self.tensor, tensor.replicas)))

    def _blob(self, blob: Blob) -> Blob:
        if isinstance(blob, Tensor):
            return self.tensor(blob)
        if isinstance(blob, DerivedBlob):
            return replace(blob, base=self._blob(blob.base))
        if not isinstance(blob, FileBlob) or blob.path not in self.seals:
            return blob
        self.used.add(blob.path)
        if blob.seal is not None or not blob.span:
            return blob
        seal = self.seals[blob.path][bisect_right(self.starts[blob.path], blob.offset) - 1]
        if blob.offset + blob.span > seal.offset + seal.nbytes:
            raise CorruptError(
                "a tensor reaches over the border of two sealed ranges: the file is not the one that was sealed",
                where=blob.path,
            )
        return replace(blob, seal=seal)
