"""What lies beside a model's weights: JSON as typed values, all else as bytes that are read when they are wanted."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.files import open_regular, read_whole
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.folder import CONFIG, TRAINER_STATE

PREFIX = "hf/"
"""Of the extras that are files, before the file's name."""
MAX_JSON_BYTES = 1 << 20
"""Bytes of a file that is carried as typed values; larger ones are carried as bytes."""
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
"""Bytes of one other file, and of all of them."""

_TYPED = (CONFIG, TRAINER_STATE, "adapter_config.json")
_MAX_TYPED_BYTES = 64 << 20
"""Bytes of those that must be understood: a long run's log is in one of them."""


def read_side_files(files: Iterable[Path]) -> tuple[dict[str, Value], tuple[SourceFile, ...], list[str]]:
    """Files by name, the shards that they are, and the names of those that are too large to carry.

    A value is what a JSON file says, or a tensor of the file's bytes. Raises
    `Corrupt` if a configuration is not JSON.
    """
    values: dict[str, Value] = {}
    shards: list[SourceFile] = []
    too_large: list[str] = []
    total = 0
    for file in files:
        with open_regular(file) as opened:
            nbytes = opened.seek(0, 2)
        if file.name in _TYPED:
            values[file.name] = parse_json_object(read_whole(file, _MAX_TYPED_BYTES), file)
        elif nbytes <= MAX_FILE_BYTES and total + nbytes <= MAX_TOTAL_BYTES:
            total += nbytes
            values[file.name] = _value(file, nbytes)
        else:
            too_large.append(file.name)
            continue
        shards.append(SourceFile(file, nbytes, "other"))
    return values, tuple(shards), too_large


def config_of(values: Mapping[str, Value], key: str = CONFIG) -> dict[str, Value] | None:
    """The model's configuration, if there is one."""
    config = values.get(key)
    return config if isinstance(config, dict) else None


def _value(file: Path, nbytes: int) -> Value:
    if file.suffix == ".json" and nbytes <= MAX_JSON_BYTES:
        try:
            return parse_json_object(read_whole(file, MAX_JSON_BYTES), file)
        except Corrupt:
            pass  # a list, or something that only looks like JSON: its bytes are carried
    return Tensor.of(FileBlob.packed(file, 0, (nbytes,), np.dtype(np.uint8)))
