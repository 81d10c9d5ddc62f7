"""Write a model as one `.gguf` file, front to back."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpt_codecs.quantised.gguf_blocks import GgufBlocks
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
from ckpt_formats.core.computed_blobs import CastBlob
from ckpt_formats.core.dtypes import DTYPES, is_float
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import FilePlan, Plan, Receipt
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.quantised.blob import QuantisedBlob
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.core.values import Value
from ckpt_formats.engines.gguf.read import ENGINE
from ckpt_formats.engines.gguf.tokenizer import tokenizer_of
from ckpt_formats.engines.hf.write import files_of_model, files_of_source
from ckpt_formats.names.config import CONFIG
from ckpt_formats.names.translate import GGUF_VALUES

FILE = "model.gguf"
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")
"""How the names of matrices end that llama.cpp needs in float32."""
_FILE_TYPE = "general.file_type"


@dataclass(frozen=True)
class GgufLayout:
    """The header of a file, and where its tensors are."""

    header: bytes
    alignment: int
    tensors: tuple[GgufTensor, ...]


def plan_model(source: Checkpoint, outtype: str | None, config: Path | None, with_tokenizer: bool) -> Plan:
    """The file to write. `config`: the folder with the tokenizer, or a config.json.

    Raises `UnsupportedError` for what GGUF cannot hold.
    """
    is_unchanged = outtype is None and source.origin.engine == ENGINE
    weights = [one for one in source.parameters.values() if one.role != "extra"]
    wanted = None if outtype is None else BLOCK_TYPES[outtype.upper()]
    stored = [_unchanged(one) if is_unchanged else _stored(one, wanted) for one in weights]
    files = files_of_model(config) if config is not None and config.is_dir() else files_of_source(source)
    tokens = tokenizer_of(source, files, _rows(source), with_tokenizer)
    values = {**_values(source), **tokens.values}
    if not is_unchanged:
        values |= _file_type(kind for one, kind in stored if not _stays_float32(one))
    alignment = alignment_of(values)
    shapes = (one.shape for one in weights)
    tensors = placed(((one.name, kind, shape) for (one, kind), shape in zip(stored, shapes, strict=True)), alignment)
    header = header_bytes(values, tensors)
    nbytes = len(header) + sum(one.nbytes + padding(one.nbytes, alignment) for one in tensors)
    parameters = tuple(one for one, _ in stored)
    file = FilePlan(FILE, parameters, GgufLayout(header, alignment, tensors), nbytes, "model")
    extras = tuple(key for key in source.extras if key not in (GGUF_VALUES, CONFIG, *tokens.files))
    dropped = (Notice("extras", extras),) if extras else ()
    return Plan((file,), (*lost_states(source), *dropped), tokens.notices, single_file=FILE)


def _rows(source: Checkpoint) -> int:
    """The rows of the embeddings."""
    table = source.parameters.get("token_embd.weight")
    return table.shape[0] if table is not None and table.shape else 0


def write_model(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write the file. No tensor is in memory as a whole."""
    seal = transfer.write_sealed(folder, part.file, _content(part, transfer))
    return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())


def _content(part: FilePlan, transfer: Transfer) -> Iterator[bytes | memoryview]:
    layout = part.content
    assert isinstance(layout, GgufLayout)
    yield layout.header
    for parameter, tensor in zip(part.parameters, layout.tensors, strict=True):
        is_plain = tensor.type.dtype is not None or parameter.weight.dtype.name == "uint8"
        yield from transfer.chunks(parameter.weight) if is_plain else _q8_0(parameter.weight, transfer)
        yield bytes(padding(tensor.nbytes, layout.alignment))


def _values(source: Checkpoint) -> Mapping[str, Value]:
    values = source.extras.get(GGUF_VALUES)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UnsupportedError(
            "the source is not a model of llama.cpp: names and sizes for llama.cpp are not known",
            where=source.path,
            hint="Convert a .gguf file.",
        )
    return values


def _q8_0(weight: Tensor, transfer: Transfer) -> Iterator[memoryview]:
    """The blocks of a weight, (..., m) float32 of whole blocks."""
    from ckpt_codecs.quantised.gguf_blocks import encode_q8_0  # few files are quantised

    kind = BLOCK_TYPES["Q8_0"]
    for _, values in transfer.slabs(weight):
        blocks = values.reshape(-1, kind.values)
        codes = np.empty((len(blocks), kind.nbytes), np.uint8)
        encode_q8_0(blocks, codes)
        yield as_bytes(codes).data


def _blocks_of(parameter: Parameter) -> tuple[Parameter, BlockType] | None:
    """A weight that is stored in blocks of GGUF, as these; None for any other."""
    fragments = parameter.weight.fragments
    blob = fragments[0].blob if len(fragments) == 1 else None
    if not isinstance(blob, QuantisedBlob) or not isinstance(blob.quantisation, GgufBlocks):
        return None
    is_whole = blob.box == Box.whole(parameter.shape) == Box.whole(blob.quantisation.shape)
    return (_as_model(parameter, blob.stored[0]), BLOCK_TYPES[blob.quantisation.type]) if is_whole else None


def _unchanged(parameter: Parameter) -> tuple[Parameter, BlockType]:
    """A weight in its own type; quantised weights as the blocks that the source has."""
    weight = parameter.weight
    if (blocks := _blocks_of(parameter)) is not None:
        return blocks
    kind = TYPES_OF_DTYPES.get(weight.dtype)
    if kind is None:
        raise UnsupportedError(
            f"tensor `{printable(parameter.name)}`: GGUF has no element type {weight.dtype.name}",
            hint="Round it with --dtype bf16, or leave it out with --skip.",
        )
    return _as_model(parameter, weight), kind


def _stored(parameter: Parameter, wanted: BlockType | None) -> tuple[Parameter, BlockType]:
    """A weight in the type in which llama.cpp takes it."""
    weight = parameter.weight
    if not is_float(weight.dtype):
        return _unchanged(parameter)
    is_ragged = wanted is not None and parameter.shape[-1:] != () and parameter.shape[-1] % wanted.values > 0
    kind = BLOCK_TYPES["F32"] if _stays_float32(parameter) or is_ragged else wanted
    if kind is None:
        return _unchanged(parameter)
    return _as_model(parameter, _cast(parameter, weight, kind)), kind


def _file_type(kinds: Iterable[BlockType]) -> dict[str, Value]:
    """What the header states of the types of matrices: the most common one."""
    ((common, _),) = Counter(kind.name for kind in kinds).most_common(1) or [("", 0)]
    return {_FILE_TYPE: np.uint32(_FILE_TYPES[common])} if common in _FILE_TYPES else {}


def _stays_float32(parameter: Parameter) -> bool:
    """Whether llama.cpp needs a weight in float32: vectors, norms, routers."""
    return len(parameter.shape) < 2 or parameter.name.endswith(_FLOAT32)


def _as_model(parameter: Parameter, weight: Tensor) -> Parameter:
    return replace(parameter, states={MODEL: weight}, values={})


def _cast(parameter: Parameter, weight: Tensor, kind: BlockType) -> Tensor:
    dtype = DTYPES["float32"] if kind.dtype is None else kind.dtype
    if weight.dtype == dtype:
        return weight
    from ckpt_codecs import Rounded  # files that are written as they are need no codec

    return Tensor.of(CastBlob(Rounded(), weight, dtype, parameter.name))
