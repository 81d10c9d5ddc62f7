"""The folders in which parity grows until one rename publishes each, and the journal of an interrupted run."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import xxhash

from ckpt.protection.parity_folders import give_name, upload, upload_changed, write_whole
from ckpt.protection.protect_plan import ProtectPlan
from ckpt_formats.core.errors import CkptError, OutputError
from ckpt_formats.core.own_folder import make_own
from ckpt_formats.core.publish import flush, flush_all
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import PARTIAL
from ckpt_formats.parity.blocks import PLAN, places_of
from ckpt_formats.parity.copies import manifest_copies
from ckpt_formats.parity.manifest import HASH_NBYTES, NAME, read

_JOURNAL = "journal"
_UPLOAD = "upload-"


class ParityDraft:
    """Where the folders with parity grow until they are published."""

    def __init__(self, plan: ProtectPlan, scratch: Path | None) -> None:
        """`scratch`: a folder for what is on its way to a store, if the protected folder is in one."""
        self.plan = plan
        own = plan.folder.base
        self.folder = own.with_name(own.name + PARTIAL) if scratch is None or not is_remote(own) else scratch / "own"
        """The one of the protected folder, which also has the journal."""
        names = dict.fromkeys(plan.elsewhere)
        self.elsewhere: dict[Path, Path] = {
            # Not in the scratch folder, so that it is there when an interrupted run goes on.
            base: self.folder / f"{_UPLOAD}{number}" if is_remote(base) else base.with_name(base.name + PARTIAL)
            for number, base in enumerate(names)
        }
        folders = tuple(self.elsewhere[base] for base in plan.elsewhere)
        places = places_of(self.folder, folders, plan.folder.manifest.parities)
        self.grown = replace(plan.folder, places=places)
        """The protected folder with the parities as they grow."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders that grow, that of the protected folder first."""
        return (self.folder, *self.elsewhere.values())

    def take_back(self) -> None:
        """Take back what a run has published elsewhere that died before all was.

        Raises `OutputError` for what is not ours.
        """
        plan = self.plan
        for base in plan.bases[:-1]:
            is_there = base.exists() if is_remote(base) else os.path.lexists(base)
            if not is_there or (base.is_dir() and not any(base.iterdir())) or _is_replaced(plan, base):
                continue
            if not any(_is_equal(plan, copy) for copy in manifest_copies([base])):
                raise OutputError("exists already", where=base, hint="Choose another folder for --into, or remove it.")
            if not is_remote(base):  # what is in a store is removed when it is written anew
                shutil.rmtree(self.elsewhere[base], ignore_errors=True)
                os.rename(base, self.elsewhere[base])

    def publish(self) -> None:
        """Write the copies of the manifest, and give all folders their names: last the one in the protected folder."""
        plan, own = self.plan, self.plan.folder.base
        data = plan.folder.hashes.to_bytes()
        for path in dict.fromkeys((*self.grown.places, *self.folders)):
            write_whole(path / NAME, data)
        for folder in self.folders:
            folder.chmod(0o755)
            flush_all(folder)
        for base, folder in self.elsewhere.items():
            if is_remote(base):
                upload(folder, base)
                continue
            with suppress(OSError):
                base.rmdir()  # an empty one
            give_name(folder, base, _is_replaced(plan, base))
        # Until here, an interrupted run goes on.
        is_replaced = not is_remote(own) and plan.overwrite and os.path.lexists(own)
        if not (is_replaced and plan.elsewhere):
            _remove_notes(self.folder)
        for folder in self.elsewhere.values():
            if folder.parent == self.folder:
                shutil.rmtree(folder)
        if is_remote(own) and plan.earlier is not None:
            upload_changed(self.folder, plan.folder)
        elif is_remote(own):
            upload(self.folder, own)
        else:
            flush(self.folder)
            give_name(self.folder, own, is_replaced)
            _remove_notes(own)  # `find_parity` knows by them that the state counts which parity elsewhere has already


class ParityJournal:
    """The stripes that are on the disk with their hashes, in the order of the manifest."""

    def __init__(self, draft: ParityDraft) -> None:
        self._folder, self._draft, self._plan = draft.folder, draft, draft.plan
        self._hashes = draft.plan.folder.hashes
        self._stripes = list(draft.plan.folder.stripes())
        self.done = 0
        """How many stripes are noted."""
        self._descriptor = -1

    def open(self) -> None:
        """Continue what an equal run left, or begin anew."""
        note = json.dumps(
            [self._plan.folder.manifest.header().decode(), [asdict(one) for one in self._plan.identities.values()]]
        ).encode()
        folders = self._draft.folders
        if not (self._is_equal(note) and all(folder.is_dir() for folder in folders)):
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in folders:
                folder.parent.mkdir(parents=True, exist_ok=True)
                make_own(folder)
            for place in self._draft.grown.places:
                place.mkdir()
            (self._folder / _JOURNAL).touch()
            write_whole(self._folder / PLAN, note)
        self._descriptor = os.open(self._folder / _JOURNAL, os.O_RDWR | os.O_CLOEXEC)
        self._read()

    def _is_equal(self, note: bytes) -> bool:
        try:
            return (self._folder / PLAN).read_bytes() == note
        except OSError:
            return False

    def _read(self) -> None:
        """Take over the records that are whole. One that is torn, and what follows, is cut off."""
        data, at = (self._folder / _JOURNAL).read_bytes(), 0
        while self.done < len(self._stripes):
            rows = self._rows(self.done)
            end = at + len(rows) * HASH_NBYTES
            record, digest = data[at:end], data[end : end + 8]
            if len(digest) < 8 or xxhash.xxh3_64_digest(record, seed=self.done) != digest:
                break
            self._hashes.table[rows] = np.frombuffer(record, np.uint8).reshape(-1, HASH_NBYTES)
            at, self.done = end + 8, self.done + 1
        os.ftruncate(self._descriptor, at)
        os.lseek(self._descriptor, at, os.SEEK_SET)

    def _rows(self, number: int) -> list[int]:
        """The rows of the hashes of a stripe."""
        group, stripe = self._stripes[number]
        return [self._hashes.row(group, at.column, stripe) for at in self._plan.folder.blocks_of(group, stripe)]

    def note(self, done: int) -> None:
        """Note the stripes up to a number, whose hashes are known and whose parities are on the disk."""
        records = bytearray()
        for number in range(self.done, done):
            record = self._hashes.table[self._rows(number)].tobytes()
            records += record + xxhash.xxh3_64_digest(record, seed=number)
        view = memoryview(records)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self.done = done

    def __enter__(self) -> "ParityJournal":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def _remove_notes(folder: Path) -> None:
    """Remove what an interrupted run would need to go on."""
    for name in (PLAN, _JOURNAL):
        (folder / name).unlink(missing_ok=True)


def _is_equal(plan: ProtectPlan, copy: Path) -> bool:
    """Whether a manifest is of the same files, domains and places."""
    try:
        return read(copy).manifest.header() == plan.folder.manifest.header()
    except (OSError, CkptError):
        return False


def _is_replaced(plan: ProtectPlan, base: Path) -> bool:
    """Whether a folder elsewhere has the parity that will be replaced: it stays until the new one is whole."""
    if not plan.overwrite:
        return False
    try:
        return str(base) in read(plan.folder.base / NAME).manifest.elsewhere and (base / NAME).is_file()
    except (OSError, CkptError):
        return False
