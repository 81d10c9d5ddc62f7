"""Which files are copied: those of the checkpoint or chain at a path, and in which order.

What the reader of the format has opened is part of it, and what is beside that without another purpose. Files that
ckpt names as not read, other checkpoints, texts and logs are not.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.folders import PARITY, below, is_harmless
from ckpt_formats.core.format import ReadOptions, identified
from ckpt_formats.core.identity import Identities, Identity, unrecorded
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import relative_path
from ckpt_formats.core.text import printable
from ckpt_formats.parity.blocks import find_parity
from ckpt_formats.registry import FORMATS
from ckpt_formats.registry.listed import is_mark
from ckpt_formats.registry.location import locate
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.registry.unread_files import OTHER_CHECKPOINTS, UNREAD
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import LoggedSteps
from ckpt_formats.universal.chain.members import open_members
from ckpt_formats.universal.chain.states import open_steps
from ckpt_formats.universal.published.records import FOLDER, HEAD, MAX_HEAD, OBJECT_KEY, Head
from ckpt_formats.universal.published.steps import read_file
from ckpt_formats.universal.stored import StoredSeals

_POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Files that name the checkpoint of a run. A run writes them again while its checkpoints stay."""
_MAX_POINTER = 1 << 16
_MAX_FILES = 1_000_000
_MAX_NAMES = 10_000
"""Names of files that are left out, in the note about them."""
_TRIES = 5
"""How often pointers are read that change meanwhile."""


@dataclass(frozen=True)
class ChosenFile:
    """A file that is copied."""

    name: str
    """Its path below the source, with slashes."""
    path: Path
    nbytes: int
    """How many of its bytes are copied: of a file that grows, those of complete records."""
    data: bytes | None = field(default=None, repr=False)
    """Its content as it was when the copy began, if it may be written again meanwhile."""


@dataclass(frozen=True)
class ChosenFiles:
    """What is copied of a path."""

    source: Checkpoint
    """The files with their identities and notices, without parameters."""
    files: tuple[ChosenFile, ...]
    last: tuple[ChosenFile, ...]
    """Those by which the format knows the whole: they are written when all others are there."""
    seals: Mapping[Path, tuple[Seal, ...]]
    """The checksums that the files promise, by file."""
    is_file: bool
    """Whether the source is one file."""
    opened: Checkpoint | None = None
    """The checkpoint as its format reads it; None for a chain."""
    logs: tuple[tuple[Path, LoggedSteps], ...] = ()
    """The segments of a chain's log, each with the chain."""

    def check_logs(self) -> int:
        """Compare what is copied of logs with their own checksums. Returns how many chunks were compared.

        Raises `CorruptError` if records are damaged. A record that a killed writer left at an end is not copied.
        """
        nbytes, count = {one.path: one.nbytes for one in self.files}, 0
        for run, logged in self.logs:
            segment = open_steps(run, logged, check_from=0)
            if damage := segment.damage:
                raise damage
            shorter = next((log for log in segment.logs if logged.step is None and log.end < nbytes[log.path]), None)
            if shorter is not None:
                raise CorruptError(shorter.torn or "is shorter than it was", where=shorter.path)
            count += sum(record.count for log in segment.logs for record in log.records)
        return count

    def check_parents(self, target: Path) -> None:
        """Raise `IncompleteError` if the copy of a delta, or of a member that shares packs, could not be read: the
        files of others that it needs are not where it would look for them, as seen from the target."""
        if self.opened is None or self.source.origin.engine != "universal":
            return
        path = self.source.path
        for one in dict.fromkeys(file.path for file in self.opened.files if not _is_below(file.path, path)):
            seen_from_source = relative_path(one.parent.resolve() / one.name, path.resolve())
            place = None if seen_from_source is None else (target / seen_from_source).resolve()
            if place is None or not place.is_file():
                raise IncompleteError(
                    f"{printable(path.name)} needs files of other checkpoints, which are not beside the copy",
                    where=place or target,
                    hint="Copy its parents first, to the same places beside it; or write it alone with `ckpt convert`.",
                )

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(one.nbytes for one in (*self.files, *self.last))


def select(path: Path, everything: bool = False) -> ChosenFiles:
    """The files of the checkpoint or chain at a path; with `everything`, all files below it.

    Raises as `open_checkpoint`: what ckpt does not know, or what is not complete, is not copied.
    """
    located = locate(path)
    if located.format.name == "chain" and "@" in path.name and not path.exists():
        raise UnsupportedError(
            "is one state of a chain: its files need those of other states",
            where=path,
            hint="Copy the chain; or write the state alone: `ckpt restore` or `ckpt convert`.",
        )
    if path.is_file():
        return _of_file(path, located.format.name)
    contents = (
        _SourceContents.of_chain(located.path)
        if located.format.name == "chain"
        else _SourceContents.of_checkpoint(path)
    )
    names = {_name(path, one) for one in contents.read}
    chosen, left_out = list[ChosenFile](), list[str]()
    parity: dict[str, list[ChosenFile]] = {}
    for name, file in below(path):
        above, mark, _ = f"/{name}".rpartition(f"/{PARITY}/")
        if mark and name not in names:
            parity.setdefault(above[1:], []).append(ChosenFile(name, file, file.stat().st_size))
        elif everything or name in names or contents.is_part(name):
            data = contents.data.get(file)
            nbytes = contents.nbytes.get(file, file.stat().st_size) if data is None else len(data)
            chosen.append(ChosenFile(name, file, nbytes, data))
        else:
            left_out.append(name)
    there = {one.name for one in chosen}
    for folder, own in parity.items():
        if everything or _is_protected_whole(path / folder if folder else path, folder, there):
            chosen += own
        else:
            left_out += [one.name for one in own]
    for missing in sorted(names - there):
        raise IncompleteError("was removed since the checkpoint was opened", where=path / missing)
    notices = contents.notices
    if left_out:
        text = "not part of the checkpoint, and not copied (`everything` (--all) copies them)"
        notices = (*notices, Notice(text, tuple(left_out[:_MAX_NAMES]), Weight.LOST))
    moving = {one.path for one in chosen if one.data is not None} | contents.nbytes.keys()
    identities = {
        one.path: contents.identities.get(one.path) or Identity.of(one.path.stat())
        for one in chosen
        if one.path not in moving
    }
    source = Checkpoint(
        path=path, origin=Origin(located.format.name), parameters={}, notices=notices, identities=identities
    )
    last = _last(chosen, located.format.name)
    names_last = {one.name for one in last}
    files = tuple(one for one in chosen if one.name not in names_last)
    seals = {path: of_file for path, of_file in _by_file(contents.seals).items() if path in identities}
    return ChosenFiles(source, files, last, seals, False, contents.opened, contents.logs)


def _is_protected_whole(folder: Path, name: str, chosen: Set[str]) -> bool:
    """Whether all files that parity protects are copied. `name`: that of the folder below the source."""
    try:
        protected = find_parity(folder).manifest.files
    except CkptError:
        return False
    above = f"{name}/" if name else ""
    return all(f"{above}{file.name}" in chosen for file in protected)


@dataclass(frozen=True)
class _SourceContents:
    """What the reader of a format found at a path."""

    read: tuple[Path, ...]
    """The files that are part of it."""
    identities: Identities
    seals: Iterable[Seal]
    notices: tuple[Notice, ...] = ()
    data: Mapping[Path, bytes] = field(default_factory=dict)
    nbytes: Mapping[Path, int] = field(default_factory=dict)
    others: frozenset[str] | None = None
    """What is beside the files and not part of it: names, those of folders with a slash. None: all else."""
    opened: Checkpoint | None = None
    logs: tuple[tuple[Path, LoggedSteps], ...] = ()

    @classmethod
    def of_checkpoint(cls, path: Path) -> "_SourceContents":
        for _ in range(_TRIES):
            pointers = _pointers(path)
            checkpoint = open_checkpoint(path, ReadOptions())
            if pointers == _pointers(path):
                break
        files = [*checkpoint.identities, *(file.path for file in checkpoint.files)]
        inside = {one: None for one in (*files, *pointers) if _is_below(one, path)}
        others: frozenset[str] | None = None
        if not locate(path).format.is_own:
            unread = (notice for notice in checkpoint.notices if notice.text in (UNREAD, OTHER_CHECKPOINTS))
            others = frozenset(name for notice in unread for name in notice.names)
        notices = tuple(one for one in checkpoint.notices if one.text not in (UNREAD, OTHER_CHECKPOINTS))
        suspicions = tuple(Notice(text, weight=Weight.UNSURE) for text in checkpoint.suspicions)
        return cls(
            tuple(inside),
            checkpoint.identities,
            checkpoint.seals,
            (*notices, *suspicions),
            pointers,
            {},
            others,
            checkpoint,
        )

    @classmethod
    def of_chain(cls, run: Path) -> "_SourceContents":
        """The list as it is now, and all that it names."""
        place = run / chain_file.NAME
        with unrecorded():
            data = read_whole(place, MAX_LIST)
        chain = chain_file.parse(data, place)
        if chain.is_published:
            return cls._of_published(run, place, data)
        members = open_members(run, chain)
        seals = list[Seal]()
        for member in chain.members:
            stored = members.open(member).seals
            assert isinstance(stored, StoredSeals)
            seals += StoredSeals(stored.checkpoints[-1:])
        nbytes, of_segments = dict[Path, int](), list[Path]()
        for logged in chain.segments:
            grown, fixed = _segment(run, logged)
            nbytes |= grown
            of_segments += fixed
        folders = {one.folder for one in chain.members} | set(chain.shared_packs())
        folders |= {chain.tip.folder} if chain.tip else set()
        in_folders = [file for name in sorted(folders) for _, file in below(run / name)]
        return cls(
            (place, *in_folders, *of_segments, *nbytes),
            members.identities,
            seals,
            (),
            {place: data},
            nbytes,
            logs=tuple((run, logged) for logged in chain.segments),
        )

    @classmethod
    def _of_published(cls, run: Path, place: Path, data: bytes) -> "_SourceContents":
        """The head as it is now, and all steps, folds and objects. A run may add more meanwhile: they are no harm."""
        pointers = {place: data}
        head = read_file(run / HEAD, MAX_HEAD)
        if head is not None:
            Head.from_bytes(head, run / HEAD)
            pointers[run / HEAD] = head
        published = run / FOLDER
        files = list(below(published)) if published.is_dir() else []
        stored = [file for name, file in files if name.startswith(("objects/", "steps/", "folds/"))]
        objects = [file for name, file in files if OBJECT_KEY.fullmatch(f"{FOLDER}/{name}")]
        # The name of an object is the hash of its bytes.
        seals = [Seal(one, 0, one.stat().st_size, "xxh3-128", int(one.name, 16), one.name) for one in objects]
        return cls((*pointers, *stored), {}, seals, (), pointers)

    def is_part(self, name: str) -> bool:
        """Whether a file that no reader opened belongs to the checkpoint."""
        if self.others is None:
            return False
        parts = name.split("/")
        above = ("/".join(parts[:depth]) + "/" for depth in range(1, len(parts)))
        return not (name in self.others or any(map(is_harmless, parts)) or any(one in self.others for one in above))


def _segment(run: Path, logged: LoggedSteps) -> tuple[dict[Path, int], list[Path]]:
    """The files of a segment that may grow, each with the bytes of its complete records; and the others."""
    segment = open_steps(run, logged)
    files = [file for _, file in below(run / logged.folder)]
    if logged.step is not None:
        return {}, files
    grown = {segment.path(rank): log.end for rank, log in enumerate(segment.logs)}
    return grown, [file for file in files if file not in grown]


def _of_file(path: Path, format: str) -> ChosenFiles:
    checkpoint = identified(lambda: open_checkpoint(path, ReadOptions()))
    only = ChosenFile(path.name, path, path.stat().st_size)
    identities = {path: checkpoint.identities.get(path) or Identity.of(path.stat())}
    source = Checkpoint(
        path=path, origin=Origin(format), parameters={}, notices=checkpoint.notices, identities=identities
    )
    return ChosenFiles(source, (only,), (), _by_file(checkpoint.seals), True, checkpoint)


def _last(files: list[ChosenFile], format: str) -> tuple[ChosenFile, ...]:
    """The files by which a format knows the whole. Where each of several files is one, the smallest of them."""
    marks = [one for one in files if is_mark(one.name)]
    if marks:
        return tuple(marks)
    patterns = FORMATS[format].marks.entries if format in FORMATS else ()  # a package's format has none
    known = [one for one in files if any(fnmatchcase(one.name.lower(), pattern) for pattern in patterns)] or files
    return (min(known, key=lambda one: (one.nbytes, one.name)),) if known else ()


def _by_file(seals: Iterable[Seal]) -> Mapping[Path, tuple[Seal, ...]]:
    by_file: dict[Path, dict[tuple[int, int, int], Seal]] = {}
    for seal in seals:
        by_file.setdefault(seal.path, {})[seal.offset, seal.nbytes, seal.digest] = seal
    return {path: tuple(of_file[key] for key in sorted(of_file)) for path, of_file in by_file.items()}


def _pointers(path: Path) -> dict[Path, bytes]:
    """The pointers in a folder, and what is in them."""
    return {path / name: read_whole(path / name, _MAX_POINTER) for name in _POINTERS if (path / name).is_file()}


def _is_below(file: Path, folder: Path) -> bool:
    """Whether a file lies in a folder. On a disk a delta reads its parent at `folder/../parent`, which does not."""
    return file.is_relative_to(folder) and ".." not in file.relative_to(folder).parts


def _name(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()
