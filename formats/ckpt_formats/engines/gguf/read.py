"""A `.gguf` file as a checkpoint: its tensors by their names in llama.cpp, its values as the extra `gguf`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpt_codecs.quantised.gguf_blocks import GGUF_TYPES, GgufBlocks
from ckpt_formats.containers.gguf import GgufFile, GgufTensor, read_header
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter, SourceFile
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import IncompleteError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.blob import quantised_tensor
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.core.values import Value
from ckpt_formats.names.translate import GGUF_VALUES

ENGINE = "llama.cpp"
_SPLIT = "split.count"


def read_model(path: Path) -> Checkpoint:
    """The model in a file. Raises as `read_header`, and `IncompleteError` for one file of several."""
    file = read_header(path)
    if (count := _count(file.values.get(_SPLIT))) > 1:
        raise IncompleteError(
            f"is one of the {count:,} files of a model", where=path, hint="Join them first: llama-gguf-split --merge."
        )
    parameters = {one.name: Parameter(one.name, "parameter", {MODEL: _tensor(file, one)}) for one in file.tensors}
    return Checkpoint(
        path=path,
        origin=Origin(ENGINE),
        parameters=parameters,
        extras={GGUF_VALUES: dict(file.values)},
        files=(SourceFile(path, file.nbytes, "model"),),
        notices=tuple(_notices(file)),
    )


def _count(value: Value) -> int:
    """The number that a value of the header is; 0 for anything but an integer."""
    return int(value) if isinstance(value, np.integer) else 0


def _tensor(file: GgufFile, one: GgufTensor) -> Tensor:
    at, kind = file.data + one.offset, one.type
    if kind.dtype is not None:
        return Tensor.of(FileBlob.packed(file.path, at, one.shape, kind.dtype))
    rows = (*one.shape[:-1], one.shape[-1] // kind.values * kind.nbytes)
    raw = FileBlob.packed(file.path, at, rows, DTYPES["uint8"])
    return quantised_tensor(GgufBlocks(one.shape, kind.name), (raw,)) if kind.name in GGUF_TYPES else Tensor.of(raw)


def _notices(file: GgufFile) -> Iterator[Notice]:
    for kind in dict.fromkeys(one.type.name for one in file.tensors if one.type.dtype is None):
        names = tuple(one.name for one in file.tensors if one.type.name == kind)
        if kind in GGUF_TYPES:
            yield Notice(f"quantised weights ({kind}): their values are float32", names)
        else:
            yield Notice(f"blocks of {kind} are read as bytes, not as numbers", names, Weight.UNSURE)
    if file.unread_nbytes:
        text = f"{format_nbytes(file.unread_nbytes)} follow the last tensor of {printable(file.path.name)}: not read"
        yield Notice(text, weight=Weight.LOST)
