"""Where a new checkpoint is written until it is complete: a hidden folder next to the target.

    .NAME.ckpt-partial/
        lock            locked while a process writes
        journal.jsonl   the plan's id, then the checksum and receipt of every finished part
        data/           what will be renamed to the target, last of all
        published       written before the rename: if it and the target exist, the folder can be removed

After a crash at any moment, the target is absent or complete. Files that the journal lists, and that still match
their checksums, are not written again.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xxhash import xxh3_64_hexdigest

from ckpt.pipeline.evidence_text import from_text, seal_from_json, seal_json, to_text
from ckpt_formats.core.errors import CkptError, Locked, OutputError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.locking import lock, unwritable
from ckpt_formats.core.publish import rename_new
from ckpt_formats.core.text import PARTIAL

Point = Literal["written", "journalled", "settled", "committed", "before rename", "renamed"]
"""The moments of a run at which tests inject crashes, and changes by other processes."""


def _nothing(point: Point) -> None:
    pass


reached: Callable[[Point], None] = _nothing
"""Called at each point, also by several threads at once. It does nothing; tests replace it to inject faults."""

_LOCK = "lock"
_PUBLISHED = "published"
_LARGE = 8 << 20
"""Files of at least so many bytes are flushed as soon as they are written."""
_FLUSHES = 8
"""Files that are flushed at the same time: each waits for the disk, even for a clean file."""


@dataclass(frozen=True)
class Staging:
    """The folder in which one target is written."""

    target: Path
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def begin(self, plan_id: str) -> None:
        """Continue with the same plan, or remove what another plan wrote."""
        if self._plan_id() != plan_id:
            if os.path.lexists(self.data):
                shutil.rmtree(self.data)  # files that stay would be published
            with self.journal.open("w") as file:
                file.write(json.dumps({"plan": plan_id}))
        with self.journal.open("a") as file:
            file.write("\n")  # ends a line that a full disk cut short
        self.data.mkdir(exist_ok=True)

    def receipts(self, format: WritableFormat) -> Iterator[Receipt]:
        """Receipts of an earlier run of a format whose files still match their checksums."""
        with Reader(check=False) as reader:
            for line in self.journal.read_text("utf-8", "replace").splitlines()[1:]:
                digest, _, text = line.partition(" ")
                if digest != xxh3_64_hexdigest(text.encode()):
                    continue  # the line that the crash cut short
                receipt = _receipt(json.loads(text))
                path = self.data / receipt.file
                is_whole = path.is_file() and path.stat().st_size == receipt.nbytes
                if is_whole and format.is_intact(self.data, receipt, reader):
                    yield receipt

    def flush(self, receipt: Receipt) -> None:
        """Flush a finished file to the disk. Small files are flushed at the end, where one commit covers many."""
        if receipt.nbytes >= _LARGE:
            _flush(self.data / receipt.file)

    def note(self, receipt: Receipt) -> None:
        """Write the receipt of a finished file to the journal."""
        text = json.dumps(_json(receipt), separators=(",", ":"))
        with self.journal.open("a") as file:
            file.write(f"{xxh3_64_hexdigest(text.encode())} {text}\n")

    def publish(self, product: str | None) -> None:
        """Flush everything to the disk, then rename it to the target."""
        with ThreadPoolExecutor(_FLUSHES, "ckpt-flush") as pool:
            list(pool.map(_flush, (*self.data.rglob("*"), self.data)))
        complete = self.data if product is None else self.data / product
        self._published.touch()
        reached("before rename")
        try:
            rename_new(complete, self.target)
        except FileExistsError:
            raise exists(self.target) from None
        reached("renamed")
        _flush(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the folder."""
        _remove(self.folder)

    @property
    def left_over(self) -> bool:
        """Was a run killed after it had published the target?"""
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
def open_staging(target: Path, locks: bool = True) -> Iterator[Staging]:
    """The staging folder of a target, locked. Raises `Locked`, `OutputError`."""
    folder = staging_folder(target)
    with locked_folder(folder, target, locks):
        yield Staging(target, folder)


def staging_folder(target: Path) -> Path:
    """The staging folder of a target."""
    return target.parent / f".{target.name}{PARTIAL}"


@contextmanager
def locked_folder(folder: Path, target: Path, locks: bool = True) -> Iterator[None]:
    """A folder, created if necessary, that no other process uses meanwhile. Raises `Locked`, which names the target.

    Without `locks`, a file system that cannot lock files is accepted.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(error, target.parent) from error
    if folder.is_symlink():
        raise OutputError("is a link; ckpt needs a folder here", where=folder, hint="Remove it.")
    with lock(folder / _LOCK, _locked(target), locks):
        yield


def sweep(place: Path) -> None:
    """Remove the staging folders in a folder whose runs were killed after they had published their targets.

    A folder that another process has locked, or that cannot be removed, stays.
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
            "the target is inside the source, or the source inside the target",
            where=target,
            hint="Choose another target.",
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
    """Remove a staging folder; its marker `published` and its lock last."""
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
        "seals": [seal_json(seal) for seal in receipt.seals],
        "entry": receipt.entry,
        "evidence": to_text(receipt.evidence),
    }


def _receipt(fields: Mapping[str, Any]) -> Receipt:
    seals = tuple(map(seal_from_json, fields["seals"]))
    return Receipt(fields["file"], fields["nbytes"], seals, fields["entry"], from_text(fields["evidence"]))
