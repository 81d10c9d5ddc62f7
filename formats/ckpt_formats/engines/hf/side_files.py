"""Read the files next to a model's weights: JSON as typed values, all others as bytes that are read on demand."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ckpt_formats.containers.contents import check_content
from ckpt_formats.containers.file_starts import HEAD_NBYTES
from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.core.files import open_regular, read_whole, unreadable
from ckpt_formats.core.folders import CONFIG, TRAINER_STATE
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.values import Value

MAX_JSON_BYTES = 1 << 20
"""A JSON file of at most this size is read as typed values, a larger one as bytes."""
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
"""The limits in bytes of one other file, and of all together."""

_TYPED = (CONFIG, TRAINER_STATE, "adapter_config.json")
_MAX_TYPED_BYTES = 64 << 20
"""The limit in bytes of the files in `_TYPED`. A long run's log is in one of them."""


def read_side_files(files: Iterable[Path]) -> tuple[dict[str, Value], tuple[SourceFile, ...], list[str]]:
    """(values by file name, the records of the files, the names of files that are too large).

    A value is the content of a JSON file, or a tensor of the file's bytes, (n,) uint8. Raises `CorruptError` if a
    configuration is not JSON.
    """
    values: dict[str, Value] = {}
    shards: list[SourceFile] = []
    too_large: list[str] = []
    total = 0
    for file in files:
        try:
            with open_regular(file) as opened:
                nbytes = opened.seek(0, 2)
        except CkptError:
            raise
        except OSError as error:
            raise unreadable(error, file) from error
        if file.name in _TYPED:
            content = read_whole(file, _MAX_TYPED_BYTES)
            check_content(content[:HEAD_NBYTES], file)
            values[file.name] = parse_json_object(content, file)
        elif nbytes <= MAX_FILE_BYTES and total + nbytes <= MAX_TOTAL_BYTES:
            total += nbytes
            values[file.name] = _value(file, nbytes)
        else:
            too_large.append(file.name)
            continue
        shards.append(SourceFile(file, nbytes, "other"))
    return values, tuple(shards), too_large


def config_of(values: Mapping[str, Value], key: str = CONFIG) -> dict[str, Value] | None:
    """The model's configuration, or None."""
    config = values.get(key)
    return config if isinstance(config, dict) else None


def _value(file: Path, nbytes: int) -> Value:
    if file.suffix == ".json" and nbytes <= MAX_JSON_BYTES:
        try:
            return parse_json_object(read_whole(file, MAX_JSON_BYTES), file)
        except CorruptError:
            pass  # a list, or not JSON despite its name: it is read as bytes
    return Tensor.of(FileBlob.packed(file, 0, (nbytes,), np.dtype(np.uint8)))
