"""The folder of a chain: its names, the leftovers of crashes, and what grows in it."""

import fcntl
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt_formats.core.errors import LockedError, OutputError
from ckpt_formats.core.folders import CHAIN_LOCK, PARITY
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.publish import flush
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import PARTIAL, STAGED
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, SharedPacks

LOCK = CHAIN_LOCK
MANIFEST = "manifest.json"
PACKS = "packs"
"""The folder of the packs in that of a member."""
_PACK = re.compile(r"([0-9]{5,10})\.safetensors")
_DRAFT = re.compile(rf"{re.escape(chain_file.NAME)}\.tmp|\.{re.escape(chain_file.NAME)}-[0-9a-f]{{32}}\.draft")
"""The list before it replaces the last one. The first name is that of ckpt 1.0.0."""
REPLAYED = ".replayed{}.tmp"
"""Where `compact` keeps the values of states that it replayed, while it runs."""
_REPLAYED = re.compile(r"\.replayed\d{1,6}\.tmp")
_STAGED = re.compile(rf"\.({chain_file.FOLDER.pattern}|{chain_file.TIP_FOLDER.pattern}){re.escape(PARTIAL)}")


def peek(run: Path) -> ChainIndex | None:
    """The chain in a folder, without a lock; None if one could begin there. Raises `OutputError`."""
    if isinstance(run, StorePath) and not run.key:
        raise OutputError("is a bucket", where=run, hint=f"Name a chain in it, such as {run}/run.chain.")
    if (run / chain_file.NAME).is_file():
        return chain_file.load(run / chain_file.NAME)
    if run.exists():
        check_empty(run)
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
        if is_shared(path.name, shared)
    )


def _unused(removed: Path, shared: list[SharedPacks]) -> list[Path]:
    """What the folder of a member that was removed has besides the packs that others need."""
    if not removed.is_dir() or removed.is_symlink():
        return []
    packs = removed / PACKS
    files = sorted(packs.iterdir()) if packs.is_dir() and not packs.is_symlink() else []
    # The manifest comes first, so that what stays does not look like a checkpoint.
    others = sorted((path for path in removed.iterdir() if path != packs), key=lambda path: path.name != MANIFEST)
    return [*others, *(path for path in files if not is_shared(path.name, shared))]


def is_shared(name: str, shared: Sequence[SharedPacks]) -> bool:
    """Whether the file of a pack is one in which states of other members lie."""
    number = pack_number(name)
    return number is not None and any(one.has(number) for one in shared)


def pack_number(name: str) -> int | None:
    """The number of a pack by the name of its file; None for another file."""
    match = _PACK.fullmatch(name)
    return None if match is None else int(match[1])


def _is_of_chain(name: str) -> bool:
    """Whether a file of this name may be part of a chain, or a leftover of one."""
    patterns = (
        *(chain_file.FOLDER, chain_file.SEGMENT_FOLDER, chain_file.TIP_FOLDER, chain_file.PIECES_FOLDER),
        *(_STAGED, _REPLAYED, _DRAFT),
    )
    return any(pattern.fullmatch(name) for pattern in patterns)


def is_growing(segment: Path) -> bool:
    """Whether a run records into the folder of a segment. While it does, it holds locks on files there.

    None records into a store: what lies there was copied. Who protects the segment has a lock there, too.
    """
    if isinstance(segment, StorePath):
        return False
    try:
        return any(_is_locked(one) for one in segment.iterdir() if not one.name.startswith(PARITY))
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_not_growing(segments: Iterable[Path], consequence: str, otherwise: str) -> None:
    """Raise `LockedError` if a run records into the folder of one of these segments.

    `consequence` and `otherwise`: what would happen, and what can be done before the run has ended.
    """
    growing = next(filter(is_growing, segments), None)
    if growing is not None:
        what, hint = f"a run is recording into this log, and {consequence}", f"End the run first, or {otherwise}."
        raise LockedError(what, where=growing, hint=hint)


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


def make(run: Path) -> bool:
    """Make the folder of a chain; False if it exists. Raises `OutputError`."""
    try:
        run.mkdir()
        flush(run.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritable(error, run) from error
    return True


def check_empty(run: Path) -> None:
    """Raise `OutputError` if a folder has other content than the leftovers of a chain."""
    if not run.is_dir():
        raise OutputError("it is a file, not a chain", where=run, hint="Name a folder that does not exist.")
    locks = (LOCK, STAGED)
    other_names = sorted(one.name for one in run.iterdir() if one.name not in locks and not _is_of_chain(one.name))
    if other_names:
        raise OutputError(
            f"the folder is not a chain, and contains {other_names[0]!r:.80}",
            where=run,
            hint="Name the chain first, then the checkpoint. A new chain needs a folder that does not exist.",
        )
