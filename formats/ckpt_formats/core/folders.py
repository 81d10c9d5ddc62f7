"""Folders: the names of their entries, and what a name tells."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckpt_formats.core.errors import CkptError, NotFoundError, OutputError, UnsafeError
from ckpt_formats.core.store_path import FolderEntry, is_remote
from ckpt_formats.core.text import PARTIAL, REPLACED, STAGED, printable

MAX_ENTRIES = 200_000
"""Limit of the entries of a folder that are read."""
SEAL_SUFFIX = ".ckpt-seal"
"""The ending of files with the checksums of a checkpoint: they are compared with it, and are no part of it."""
PARITY = ".ckpt-parity"
"""The folder with the parity of the folder that it is in. That of a single file also has the file's name before."""
CHAIN_LOCK = "chain.lock"
"""Locked by the process that changes a chain."""
CONFIG = "config.json"
TRAINER_STATE = "trainer_state.json"
_LONG_NAME = 200
"""Bytes of a file's name. Most systems allow 255; what grows beside a file has up to 50 more."""
_HARMLESS = re.compile(
    r"\..*|(readme|licen[cs]e|notice|copying)(\..*)?|.*\.(md|rst|log|lock|html|png|jpe?g|svg|gif|tmp~|ckpt-seal)"
    r"|events\.out\.tfevents\..*|__pycache__"
    r"|latest|latest_universal|latest_checkpointed_iteration\.txt|zero_to_(fp32|torch)\.py",
    re.IGNORECASE,
)
"""Texts, pictures, logs, locks, seals, hidden files, and pointers to a checkpoint: they contain no part of one."""
_TORCH_FILE_OF_A_RUN = re.compile(
    r"(optimizer|scheduler)(_\d+)?\.(pt|bin)|scaler\.pt|rng_state(_\d+)?\.pth|training_args\.bin"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|(sampler|dl_state_dict)(_\d+)?\.bin"
)
INDEX_SUFFIX = ".index.json"
NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.[a-z]+)")
_OF_VLLM = re.compile(r"model-rank-(\d{1,6})-part-(\d{1,6})\.safetensors")


def hidden_name(name: str, ending: str) -> str:
    """The name of a hidden file beside one of this name: with its hash if the name is too long for an ending."""
    given = os.fsencode(name)
    if len(given) <= _LONG_NAME:
        return f".{name}{ending}"
    import xxhash  # few names are long

    return f".{xxhash.xxh3_128_hexdigest(given)}{ending}"


def parity_of_file(file: Path) -> Path:
    """The folder with the parity of a single file, whether the file is there or not."""
    return file.parent / hidden_name(file.name, PARITY)


def replaced_file(file: Path) -> Path:
    """A second name of a file that another one is about to replace, because its seal file or parity lies beside it."""
    return file.parent / hidden_name(file.name, REPLACED)


def has_stale_sidecars(file: Path) -> bool:
    """Has a file been replaced by a job that was killed before it removed what lies beside the old one?

    A copy of the folder may have two files in the place of two names: if they have the time of one file, they are one.
    Whole seconds are no such time, because some file systems have no others.
    """
    if is_remote(file):
        return False
    try:
        old, new = replaced_file(file).lstat(), file.lstat()
    except OSError:
        return False
    is_copied = (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns) and old.st_mtime_ns % 1_000_000_000
    return stat.S_ISREG(old.st_mode) and not (is_copied or os.path.samestat(old, new))


def check_no_stale_sidecars(file: Path) -> None:
    """Raise `OutputError` if what lies beside a file is of another one, so that nothing may be added to it."""
    if has_stale_sidecars(file):
        raise OutputError(
            "replaced another file whose checksums or parity are still beside it, because a job was killed",
            where=file,
            hint=f"Remove them with `ckpt clean {printable(str(file))}`.",
        )


def file_nbytes(path: Path, otherwise: int = -1) -> int:
    """The length of a file, or `otherwise` if there is none."""
    try:
        return path.stat().st_size if path.is_file() else otherwise
    except OSError:
        return otherwise


def entries_of(path: Path) -> Iterator[FolderEntry]:
    """The entries of a folder, in any order. Raises `OSError`."""
    if is_remote(path):
        yield from path.entries()
        return
    with os.scandir(path) as entries:
        yield from entries


def below(root: Path, above: str = "") -> Iterator[tuple[str, Path]]:
    """All files below a folder: their names with slashes, in order. Not what processes keep there while they write.

    Links to files are followed, links to folders are not. Raises `UnsafeError` for names that no folder can have.
    """
    try:
        entries = sorted(entries_of(root), key=lambda entry: entry.name)
    except CkptError:
        raise
    except OSError as error:
        raise NotFoundError(f"cannot be listed: {error.strerror or error}", where=root) from None
    for entry in entries:
        path, name = root / entry.name, f"{above}{entry.name}"
        if entry.name in ("", ".", "..") or "\0" in entry.name:
            raise UnsafeError(f"no file can have the name `{printable(entry.name)}`", where=root)
        if entry.is_dir() and not entry.is_symlink():
            if not entry.name.endswith(PARTIAL) and entry.name != STAGED:
                yield from below(path, f"{name}/")
        elif entry.is_file() and name != CHAIN_LOCK:
            yield name, path


def names_in(path: Path) -> list[str]:
    """The names in a folder, sorted, at most `MAX_ENTRIES`; none if it cannot be read."""
    try:
        return sorted(entry.name for entry, _ in zip(entries_of(path), range(MAX_ENTRIES), strict=False))
    except OSError:
        return []


def is_torch_file_of_run(name: str) -> bool:
    """Whether Trainer and Accelerate write a file of this name with torch.save, beside a model."""
    return _TORCH_FILE_OF_A_RUN.fullmatch(name) is not None


def is_of_trainer(name: str) -> bool:
    """Whether a trainer of Hugging Face writes a file of this name around the checkpoint of an engine."""
    return name in (CONFIG, TRAINER_STATE) or is_torch_file_of_run(name)


def is_harmless(name: str) -> bool:
    """Whether a file or a folder, by its name, contains no part of a checkpoint."""
    return _HARMLESS.fullmatch(name) is not None


class ShardNumber(NamedTuple):
    """The numbers in a file name: `model-00002-of-00003.safetensors` is file 2 of 3 of `model`."""

    stem: str
    number: int
    total: int


def number_of(name: str) -> ShardNumber | None:
    """The numbers in a file name; None if it has none."""
    match = NUMBERED.fullmatch(name)
    return None if match is None else ShardNumber(match[1], int(match[2]), int(match[3]))


def part_of_vllm(name: str) -> tuple[int, int] | None:
    """The rank and the number of a file of vLLM's sharded state, by its name; None for other names."""
    match = _OF_VLLM.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))
