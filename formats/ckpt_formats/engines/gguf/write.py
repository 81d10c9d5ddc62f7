"""Write a model as one `.gguf` file, front to back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpt_formats.containers.gguf import (
    BLOCK_TYPES,
    TYPES_OF_DTYPES,
    BlockType,
    GgufTensor,
    alignment_of,
    header_bytes,
    padding,
    placed,
)
from ckpt_formats.containers.safetensors_shards import lost_states
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, is_float
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FilePlan, Plan, Receipt
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import CastBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value
from ckpt_formats.engines.gguf.read import VALUES

FILE = "model.gguf"
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
_FILE_TYPE = "general.file_type"


@dataclass(frozen=True)
class GgufLayout:
    """The header of a file, and where its tensors are."""

    header: bytes
    alignment: int
    tensors: tuple[GgufTensor, ...]


def plan_model(source: Checkpoint, outtype: str | None) -> Plan:
    """The file to write. Raises `UnsupportedError` for what GGUF cannot hold."""
    values = _values(source)
    weights = [one for one in source.parameters.values() if one.role != "extra"]
    named = [*weights, *(replace(source.parameters[name], name=alias) for alias, name in source.aliases.items())]
    stored = [_stored(one, None if outtype is None else BLOCK_TYPES[outtype.upper()]) for one in named]
    if outtype is not None:
        values = {**values, _FILE_TYPE: np.uint32(_FILE_TYPES[outtype.upper()])}
    alignment = alignment_of(values)
    tensors = placed(((one.name, kind, one.shape) for one, kind in stored), alignment)
    header = header_bytes(values, tensors)
    nbytes = len(header) + sum(one.nbytes + padding(one.nbytes, alignment) for one in tensors)
    parameters = tuple(one for one, _ in stored)
    file = FilePlan(FILE, parameters, GgufLayout(header, alignment, tensors), nbytes, "model")
    extras = tuple(key for key in source.extras if key != VALUES)
    dropped = (Notice("extras", extras),) if extras else ()
    return Plan((file,), (*lost_states(source), *dropped), single_file=FILE)


def write_model(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write the file. No tensor is in memory as a whole."""
    seal = write_sealed(folder, part.file, _content(part, transfer))
    return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())


def _content(part: FilePlan, transfer: Transfer) -> Iterator[bytes | memoryview]:
    layout = part.content
    assert isinstance(layout, GgufLayout)
    yield layout.header
    for parameter, tensor in zip(part.parameters, layout.tensors, strict=True):
        yield from transfer.chunks(parameter.weight)
        yield bytes(padding(tensor.nbytes, layout.alignment))


def _values(source: Checkpoint) -> Mapping[str, Value]:
    values = source.extras.get(VALUES)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UnsupportedError(
            "the source is no model of llama.cpp: names and sizes for llama.cpp are not known",
            where=source.path,
            hint="Convert a .gguf file.",
        )
    return values


def _stored(parameter: Parameter, wanted: BlockType | None) -> tuple[Parameter, BlockType]:
    """A weight in the type in which it is stored."""
    weight = parameter.weight
    if wanted is None or not is_float(weight.dtype):
        kind = TYPES_OF_DTYPES.get(weight.dtype)
        if kind is None:
            raise UnsupportedError(
                f"tensor `{printable(parameter.name)}`: GGUF has no element type {weight.dtype.name}",
                hint="Round it with --dtype bf16, or leave it out with --skip.",
            )
        return _as_model(parameter, weight), kind
    kind = BLOCK_TYPES["F32"] if _stays_float32(parameter) else wanted
    assert kind.dtype is not None
    return _as_model(parameter, _cast(parameter, weight, kind)), kind


def _stays_float32(parameter: Parameter) -> bool:
    """Whether llama.cpp needs a weight in float32: vectors, norms, routers."""
    return len(parameter.shape) < 2 or parameter.name.endswith(("_norm.weight", ".ffn_gate_inp.weight"))


def _as_model(parameter: Parameter, weight: Tensor) -> Parameter:
    return replace(parameter, states={MODEL: weight}, values={})


def _cast(parameter: Parameter, weight: Tensor, kind: BlockType) -> Tensor:
    dtype = DTYPES["float32"] if kind.dtype is None else kind.dtype
    if weight.dtype == dtype:
        return weight
    from ckpt_codecs import Rounded  # files that are written as they are need no codec

    return Tensor.of(CastBlob(Rounded(), weight, dtype, parameter.name))
