"""The folders in which parity grows, beside the published ones, and their publication by one rename each."""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckpt.protection.parity_folders import give_name, upload, upload_changed, write_whole
from ckpt.protection.protect_plan import ProtectPlan
from ckpt_formats.core.errors import CkptError, OutputError
from ckpt_formats.core.publish import flush, flush_all
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import PARTIAL
from ckpt_formats.parity.blocks import PLAN, places_of
from ckpt_formats.parity.copies import manifest_copies
from ckpt_formats.parity.manifest import NAME, read

JOURNAL = "journal"
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


def _remove_notes(folder: Path) -> None:
    """Remove what an interrupted run would need to go on."""
    for name in (PLAN, JOURNAL):
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
