"""Check every file of a checkpoint that cannot be opened, so that all damage is named and not only the first.

Files are recognised by their content or ending. Files that can only be read together with others, such as the data of
torch.distributed.checkpoint, are not checked.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckpt.findings.report import Finding
from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.safetensors import read_header
from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.core.files import Reader, open_regular, read_whole
from ckpt_formats.core.seal_checks import seal_is_valid
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file

_MAX_FILES = 1 << 20
_MAX_JSON = 1 << 26
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_SEALED = (manifest.NAME, chain_file.NAME)


def survey(path: Path, error: CkptError, resources: Resources) -> list[Finding]:
    """The error as a finding, and the findings of all files, each once."""
    findings = [Finding("unreadable", error.what, error.where or str(path))]
    with ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        for several in run_tasks(pool, _examine, _files(_root(path, error)), 2 * resources.workers):
            findings += several
    first = findings[0].where
    remaining = [one for one in findings[1:] if one.kind != "unreadable" or not first.startswith(one.where)]
    return [findings[0], *sorted(remaining, key=lambda finding: finding.where)]


def _root(path: Path, error: CkptError) -> Path:
    """The checkpoint's own folder: of a run's folder with several steps, the one that the error names."""
    blamed = None if error.where is None else Path(error.where)
    if blamed is None or path not in blamed.parents or not path.is_dir():
        return path
    below = path / blamed.relative_to(path).parts[0]
    return below if below.is_dir() and any(path.glob("latest*")) else path


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for number, path in enumerate(sorted(root.rglob("*"))):
        if number < _MAX_FILES and path.is_file():
            yield path


def _examine(path: Path) -> list[Finding]:
    try:
        return list(_kind_of(path)(path))
    except CkptError as error:
        return [Finding("unreadable", error.what, str(path))]


def _kind_of(path: Path) -> Callable[[Path], Iterator[Finding]]:
    if path.suffix == ".safetensors":
        return _safetensors
    if path.suffix == ".json":
        return _json
    with open_regular(path) as file:
        head = file.read(2)
    if path.suffix in _TORCH or (head == b"PK" and path.suffix != ".distcp"):
        return _torch
    return _unknown


def _unknown(path: Path) -> Iterator[Finding]:
    return iter(())


def _safetensors(path: Path) -> Iterator[Finding]:
    read_header(path)
    return iter(())


def _json(path: Path) -> Iterator[Finding]:
    if path.name in _SEALED:
        sealed_json.load(path, _MAX_JSON, "the kind that its name states")
    else:
        _parse(path)
    return iter(())


def _parse(path: Path) -> None:
    try:
        json.loads(read_whole(path, _MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not valid JSON: {error}", where=path) from None


def _torch(path: Path) -> Iterator[Finding]:
    with Reader(check=False) as reader:
        for seal in open_file(path).seals():
            if not seal_is_valid(seal, reader):
                message = f"{seal.label}: {seal.nbytes:,} bytes do not fit their {seal.kind} checksum"
                yield Finding("checksum", message, str(path))
