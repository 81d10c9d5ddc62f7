"""Where a new checkpoint grows until it is whole: a hidden folder beside the target.

    .NAME.ckpt-partial/
        lock            held while a process writes
        journal.jsonl   the plan's id, then the checksum and receipt of every finished part
        data/           what will be renamed to the target, last of all
        published       from then on: if the target is there, the rest is to be removed

A crash at any moment leaves the target absent or whole. What the journal lists
and still verifies is not written again.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from xxhash import xxh3_64_hexdigest

from ckpt.publish import rename_new
from ckpt_formats.core.errors import CkptError, Locked, OutputError
from ckpt_formats.core.files import Evidence, Reader, Seal, seal_is_valid
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.locking import lock, unwritable
from ckpt_formats.core.text import PARTIAL

Point = Literal["written", "journalled", "settled", "committed", "before rename", "renamed"]
"""The moments of a run between which a crash, or a change by another process, makes a difference."""


def _nothing(point: Point) -> None:
    pass


reached: Callable[[Point], None] = _nothing
"""Called at each of them, also by several threads at once. It does nothing; tests put their faults here."""

_LOCK = "lock"
_PUBLISHED = "published"
_LARGE = 8 << 20
"""Bytes from which a file is flushed as soon as it is written."""
_FLUSHES = 8
"""At a time: each waits for the disk, also for a file that is clean, and those that wait together wait once."""


@dataclass(frozen=True)
class Staging:
    """The folder in which one target grows."""

    target: Path
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def begin(self, plan_id: str) -> None:
        """Go on with the same plan, or start anew with another one."""
        if self._plan_id() != plan_id:
            if os.path.lexists(self.data):
                shutil.rmtree(self.data)  # what would stay would be published
            with self.journal.open("w") as file:
                file.write(json.dumps({"plan": plan_id}))
        with self.journal.open("a") as file:
            file.write("\n")  # ends a line that a full disk cut short
        self.data.mkdir(exist_ok=True)

    def receipts(self) -> Iterator[Receipt]:
        """Receipts of an earlier run whose files are still as they were written."""
        with Reader(check=False) as reader:
            for line in self.journal.read_text("utf-8", "replace").splitlines()[1:]:
                digest, _, text = line.partition(" ")
                if digest != xxh3_64_hexdigest(text.encode()):
                    continue  # the line that the crash cut short
                receipt = _receipt(json.loads(text))
                path = self.data / receipt.file
                seals = [replace(seal, path=path) for seal in receipt.seals]
                if (
                    path.is_file()
                    and path.stat().st_size == receipt.nbytes
                    and all(seal_is_valid(s, reader) for s in seals)
                ):
                    yield receipt

    def flush(self, receipt: Receipt) -> None:
        """Bring a finished part's file to the disk; small ones wait for the end, where one commit takes many."""
        if receipt.nbytes >= _LARGE:
            _flush(self.data / receipt.file)

    def note(self, receipt: Receipt) -> None:
        """Remember that a part is done."""
        text = json.dumps(_json(receipt), separators=(",", ":"))
        with self.journal.open("a") as file:
            file.write(f"{xxh3_64_hexdigest(text.encode())} {text}\n")

    def publish(self, product: str | None) -> None:
        """Flush everything to the disk, then make it the target by one rename."""
        with ThreadPoolExecutor(_FLUSHES, "ckpt-flush") as pool:
            list(pool.map(_flush, (*self.data.rglob("*"), self.data)))
        whole = self.data if product is None else self.data / product
        self._published.touch()
        reached("before rename")
        try:
            rename_new(whole, self.target)
        except FileExistsError:
            raise exists(self.target) from None
        reached("renamed")
        _flush(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Leave nothing behind."""
        _remove(self.folder)

    @property
    def left_over(self) -> bool:
        """Has a run been killed after it had published the target?"""
        return self._published.exists() and os.path.lexists(self.target)

    @property
    def _published(self) -> Path:
        return self.folder / _PUBLISHED

    def _plan_id(self) -> str | None:
        try:
            with self.journal.open() as file:
                first: dict[str, str] = json.loads(file.readline())
                return first["plan"]
        except (OSError, ValueError, KeyError, TypeError):
            return None


@contextmanager
def staging(target: Path, locks: bool = True) -> Iterator[Staging]:
    """The staging folder of a target, locked. Raises `Locked`, `OutputError`."""
    folder = staging_folder(target)
    with locked_folder(folder, target, locks):
        yield Staging(target, folder)


def staging_folder(target: Path) -> Path:
    """Where a target grows."""
    return target.parent / f".{target.name}{PARTIAL}"


@contextmanager
def locked_folder(folder: Path, target: Path, locks: bool = True) -> Iterator[None]:
    """A folder, made if need be, that nobody else has meanwhile. Raises `Locked`, which names the target.

    Without `locks`, a file system that cannot lock is trusted.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(error, target.parent) from error
    if folder.is_symlink():
        raise OutputError("is a link, where a folder of ours should be", where=folder, hint="Remove it.")
    with lock(folder / _LOCK, _locked(target), locks):
        yield


def sweep(place: Path) -> None:
    """Remove what runs left behind in a folder that were killed after they had published their targets.

    What another process holds, or cannot be removed, stays.
    """
    for folder in place.glob(f".?*{PARTIAL}"):
        stage = Staging(place / folder.name[1 : -len(PARTIAL)], folder)
        if stage.left_over:
            with suppress(CkptError), locked_folder(folder, stage.target):
                if stage.left_over:
                    stage.discard()


def check_target(target: Path, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    if os.path.lexists(target):
        sweep(target.parent)
        raise exists(target)
    here, there = target.resolve(), source.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise OutputError(
            "the target and the source lie inside one another", where=target, hint="Choose another target."
        )
    if not target.parent.is_dir():
        raise OutputError(
            "the folder that should hold the target does not exist", where=target.parent, hint="Create it first."
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError("no permission to write here", where=target.parent, hint="Choose another target.")


def _locked(target: Path) -> Locked:
    return Locked("another process is writing this target", where=target, hint="Wait for it to end.")


def exists(target: Path) -> OutputError:
    return OutputError("the target exists already", where=target, hint="Choose another name, or remove it first.")


def _remove(folder: Path) -> None:
    """What says that it is to be removed goes last."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name in (_PUBLISHED, _LOCK)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        folder.rmdir()


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _json(receipt: Receipt) -> dict[str, Any]:
    return {
        "file": receipt.file,
        "nbytes": receipt.nbytes,
        "seals": [_seal_json(seal) for seal in receipt.seals],
        "entry": receipt.entry,
        "evidence": [[*_seal_json(e.seal), e.start, e.stop, str(e.digest)] for e in receipt.evidence],
    }


def _seal_json(seal: Seal) -> list[Any]:
    return [str(seal.path), seal.offset, seal.nbytes, seal.kind, str(seal.digest), seal.label]


def _receipt(said: Mapping[str, Any]) -> Receipt:
    evidence = tuple(Evidence(_seal(e[:6]), e[6], e[7], int(e[8])) for e in said["evidence"])
    return Receipt(said["file"], said["nbytes"], tuple(map(_seal, said["seals"])), said["entry"], evidence)


def _seal(said: list[Any]) -> Seal:
    path, offset, nbytes, kind, digest, label = said
    return Seal(Path(path), offset, nbytes, kind, int(digest), label)
