"""What a checkpoint carries without reading it: one walk over its extras, whatever format and layout it has.

A file next to a model, or the bytes of a file inside another one, may hold tensors, stand for a file that was never
fetched, or be cut off. Nothing reads it, so it is named here.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpt_formats.containers.file_starts import HEAD_NBYTES, STAND_IN, holds_tensors, is_file_inside
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import read_range, read_whole
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import FileBlob
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.files_inside import HOLDS_TENSORS, files_inside
from ckpt_formats.state_dicts.leaves import is_extra_state
from ckpt_formats.state_dicts.run_files import PREFIX

NO_JSON = "is not valid JSON, although its ending says so, and may be cut off; carried as bytes"

_MAX_STAND_IN = 1 << 10
"""Bytes: a pointer of Git LFS has at most these."""
_MAX_FILES = 10_000
_TENSOR_ENDINGS = (
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".th", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".gguf"),
    *(".pdparams", ".joblib", ".msgpack", ".zip", ".tar"),
)
"""Endings for which it is worth a request to a store to look at a file's first bytes."""


def notices_of_carried(checkpoint: Checkpoint) -> Iterator[Notice]:
    """Notices that name what is carried as bytes, although it holds tensors or is not what it should be."""
    inside = tuple(files_inside(_values(checkpoint)))
    unread: list[str] = []
    no_json: list[str] = []
    stand_ins: dict[str, list[str]] = {}
    for name, blob, nbytes in _bytes_of_files(checkpoint):
        head = _head(blob, nbytes)
        if STAND_IN.match(head):
            from ckpt_formats.containers.contents import foreign_content  # few checkpoints have one

            if (content := foreign_content(head)) is not None:
                stand_ins.setdefault(content.what, []).append(name)
        elif holds_tensors(head) if _is_file(blob, nbytes) else is_file_inside(head):
            unread.append(name)
        elif _is_file(blob, nbytes) and blob.path.suffix == ".json" and _is_no_json(blob.path, nbytes):
            no_json.append(name)
    if inside or unread:
        yield Notice(HOLDS_TENSORS, (*inside, *unread), Weight.LOST)
    for what, names in stand_ins.items():
        yield Notice(what, tuple(names), Weight.LOST)
    if no_json:
        yield Notice(NO_JSON, tuple(no_json), Weight.UNSURE)


def _bytes_of_files(checkpoint: Checkpoint) -> Iterator[tuple[str, FileBlob, int]]:
    """The vectors of bytes among the extras, as (name, where they are, bytes)."""
    count = 0
    for name, parameter in checkpoint.parameters.items():
        if parameter.role != "extra" or count == _MAX_FILES or is_extra_state(name):
            continue
        tensor = parameter.weight
        if tensor.dtype != np.uint8 or len(tensor.shape) != 1 or len(tensor.fragments) != 1 or not tensor.nbytes:
            continue
        blob = tensor.fragments[0].blob
        if isinstance(blob, FileBlob) and blob.is_packed:
            count += 1
            yield name.removeprefix(PREFIX), blob, tensor.nbytes


def _head(blob: FileBlob, nbytes: int) -> bytes:
    """The first bytes; none if they are not worth a request to a store."""
    is_small = nbytes <= _MAX_STAND_IN
    if is_remote(blob.path) and not is_small and blob.path.suffix.lower() not in _TENSOR_ENDINGS:
        return b""
    try:
        return read_range(blob.path, blob.offset, min(nbytes, HEAD_NBYTES))
    except CkptError:
        return b""  # whoever reads the values reports it


def _is_file(blob: FileBlob, nbytes: int) -> bool:
    return blob.offset == 0 and blob.path.stat().st_size == nbytes


def _is_no_json(path: Path, nbytes: int) -> bool:
    if nbytes > MAX_SMALL_JSON:
        return False
    try:
        json.loads(read_whole(path, MAX_SMALL_JSON))
    except (ValueError, RecursionError):
        return True
    return False


def _values(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    """The extras, values of parameters and options of groups, with their places."""
    yield from checkpoint.extras.items()
    for name, parameter in checkpoint.parameters.items():
        if parameter.values:
            yield from ((f"{name}.{key}", value) for key, value in parameter.values.items())
    for number, group in enumerate(checkpoint.groups):
        yield from ((f"group {number}.{key}", value) for key, value in group.options.items())
