"""The folder of a chain: its lock, the leftovers of crashes, and how its list is replaced."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_formats.core.errors import CkptError, LockedError, OutputError
from ckpt_formats.core.locking import lock, unwritable
from ckpt_formats.core.own_folder import create_own
from ckpt_formats.core.publish import flush
from ckpt_formats.core.publish import replace as rename_over
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import PARTIAL, STAGED
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex, SharedPacks

LOCK = "chain.lock"
MANIFEST = "manifest.json"
PACKS = "packs"
"""The folder of the packs in that of a member."""
_PACK = re.compile(r"([0-9]{5,10})\.safetensors")
_DRAFT = f"{index.NAME}.tmp"
REPLAYED = ".replayed{}.tmp"
"""Where `compact` keeps the values of states that it replayed, while it runs."""
_REPLAYED = re.compile(r"\.replayed\d{1,6}\.tmp")
_STAGED = re.compile(rf"\.({index.FOLDER.pattern}|{index.TIP_FOLDER.pattern}){re.escape(PARTIAL)}")


@contextmanager
def locked(run: Path, create: bool = False, locks: bool = True) -> Iterator[ChainIndex | None]:
    """Within, hold the lock of a chain. Gives the chain in the folder, or None if there is none yet.

    Raises `LockedError`, `NotFoundError` if the folder is no chain, `OutputError` if it has other content.
    """
    if not create and not (run / index.NAME).is_file():
        index.read(run)  # raises the error that it is no chain
    created = _make(run) if create else False
    if not created and not (run / index.NAME).is_file():
        _check_empty(run)
    taken = LockedError("another process is changing this chain", where=run, hint="Wait for it to end.")
    try:
        with lock(run / LOCK, taken, locks):
            chain = index.load(run / index.NAME) if (run / index.NAME).is_file() else None
            try:
                yield chain
            finally:
                if created and os.listdir(run) == [LOCK]:  # nothing was added
                    os.unlink(run / LOCK)
                    os.rmdir(run)
    except CkptError as error:
        if created and isinstance(error, OutputError):
            with suppress(OSError):
                os.unlink(run / LOCK)
                os.rmdir(run)
        raise
    except OSError as error:
        raise unwritable(error, run) from error


def peek(run: Path) -> ChainIndex | None:
    """The chain in a folder, without a lock; None if one could begin there. Raises as `locked`."""
    if (run / index.NAME).is_file():
        return index.load(run / index.NAME)
    if run.exists():
        _check_empty(run)
    return None


def leftovers(run: Path, chain: ChainIndex | None, resumed: str | None = None) -> list[Path]:
    """The leftovers of interrupted runs: members that the chain does not name, and unfinished ones.

    Of a member that was removed, the packs stay in which states of other members lie. The unfinished files of the
    member `resumed` are not among them, because the run that writes it continues.
    """
    named = {resumed and f".{resumed}{PARTIAL}", *(one.folder for one in (chain.members if chain else ()))}
    named |= {one.folder for one in (chain.segments if chain else ())}
    named |= {chain.tip.folder} if chain and chain.tip else set()
    packs = {name: shared for name, shared in (chain.shared_packs() if chain else {}).items() if name not in named}
    named |= packs.keys()
    entries = (entry for entry in sorted(run.iterdir()) if _is_of_chain(entry.name) and entry.name not in named)
    unused = [path for name, shared in packs.items() for path in _unused(run / name, shared)]
    return [*(entry for entry in entries if not is_growing(entry)), *unused]


def kept_nbytes(run: Path, chain: ChainIndex) -> int:
    """The bytes of the packs that stay of members that were removed."""
    members = {member.folder for member in chain.members}
    return sum(
        path.stat().st_size
        for name, shared in chain.shared_packs().items()
        if name not in members
        for path in (run / name / PACKS).glob("*")
        if _is_shared(path.name, shared)
    )


def _unused(removed: Path, shared: list[SharedPacks]) -> list[Path]:
    """What the folder of a member that was removed has besides the packs that others need."""
    if not removed.is_dir() or removed.is_symlink():
        return []
    packs = removed / PACKS
    files = sorted(packs.iterdir()) if packs.is_dir() and not packs.is_symlink() else []
    # The manifest comes first, so that what stays does not look like a checkpoint.
    others = sorted((path for path in removed.iterdir() if path != packs), key=lambda path: path.name != MANIFEST)
    return [*others, *(path for path in files if not _is_shared(path.name, shared))]


def _is_shared(name: str, shared: list[SharedPacks]) -> bool:
    number = pack_number(name)
    return number is not None and any(one.has(number) for one in shared)


def pack_number(name: str) -> int | None:
    """The number of a pack by the name of its file; None for another file."""
    match = _PACK.fullmatch(name)
    return None if match is None else int(match[1])


def _is_of_chain(name: str) -> bool:
    """Whether a file of this name may be part of a chain, or a leftover of one."""
    patterns = (
        *(index.FOLDER, index.SEGMENT_FOLDER, index.TIP_FOLDER, index.PIECES_FOLDER),
        *(_STAGED, _REPLAYED),
    )
    return name == _DRAFT or any(pattern.fullmatch(name) for pattern in patterns)


def is_growing(segment: Path) -> bool:
    """Whether a run records into the folder of a segment. While it does, it holds locks on files there.

    None records into a store: what lies there was copied.
    """
    if isinstance(segment, StorePath):
        return False
    try:
        return any(map(_is_locked, segment.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_locked(path: Path) -> bool:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # the file system has no locks
    finally:
        os.close(opened)
    return False


def remove(paths: list[Path]) -> None:
    """Remove folders and files. Links are not followed."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            # A partly removed folder must not look like a checkpoint, so its manifest is removed first.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
        else:
            path.unlink()


def replace(run: Path, chain: ChainIndex) -> None:
    """Replace the chain of a folder by `chain`, with one rename. It is on the disk when this returns."""
    draft = run / _DRAFT
    with os.fdopen(create_own(draft), "wb") as file:
        file.write(index.dump(chain))
        file.flush()
        os.fsync(file.fileno())
    rename_over(draft, run / index.NAME)
    flush(run)


def _make(run: Path) -> bool:
    try:
        run.mkdir()
        flush(run.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritable(error, run) from error
    return True


def _check_empty(run: Path) -> None:
    if not run.is_dir():
        raise OutputError("it is a file, not a chain", where=run, hint="Name a folder that does not exist.")
    locks = (LOCK, STAGED)
    other_names = sorted(one.name for one in run.iterdir() if one.name not in locks and not _is_of_chain(one.name))
    if other_names:
        raise OutputError(
            f"the folder is no chain, and contains {other_names[0]!r:.80}",
            where=run,
            hint="Name a folder that does not exist.",
        )
