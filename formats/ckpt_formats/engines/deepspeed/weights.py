"""Read the model's tensors: weights in the model's precision, frozen parameters, buffers, and names of tied weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import FileBlob, Tensor, read, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.deepspeed.lookups import get, is_tensor, shape_of, tensor, vector
from ckpt_formats.engines.deepspeed.zero3 import from_slices

_MAX_COMPARED_BYTES = 1 << 20
"""Bytes of a buffer that are read to compare ranks."""


@dataclass
class ModelTensors:
    """Tensors by name, in the shapes of one model-parallel rank."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """The module's own order of names."""
    frozen: frozenset[str] | None = None
    """The names of frozen parameters; None if the file does not list them."""

    def may_be_frozen(self, name: str) -> bool:
        """Does no list of frozen parameters exclude this name?"""
        return self.frozen is None or name in self.frozen or name not in self.order


def model_dtype(config: Mapping[str, Value]) -> DType:
    """The type of the model's weights, from the run's configuration."""
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled"):
            return DTYPES[name]
    return DTYPES["float32"]


def read_module(files: Sequence[TorchFile], stage3: bool) -> ModelTensors:
    """The tensors of one model-parallel rank, from its model file or, at stage 3, one file per data-parallel rank."""
    file = files[0]
    model = ModelTensors()
    module = file.root.get("module") or {}
    buffers = {str(name) for name in file.root.get("buffer_names") or ()}
    for name, value in _tensors(module):
        model.order.append(name)
        if stage3 and name not in buffers and not value.size:
            continue  # stage 3 stores an empty placeholder
        model.tensors[name] = tensor(value, file.path)
        if name in buffers:
            model.buffers.add(name)
    frozen = file.root.get("frozen_param_shapes")
    model.frozen = None if frozen is None else frozenset(map(str, frozen))
    for name, listed in (frozen or {}).items():
        shape = shape_of(listed, file.path)
        if stage3:
            slices = [vector(get(f.root["frozen_param_fragments"], name, object, f.path), f.path) for f in files]
            model.tensors[str(name)] = from_slices(shape, slices) if prod(shape) else Tensor(shape, slices[0].dtype, ())
        else:
            _check_frozen(model, str(name), shape, file)
    model.aliases = {str(a): str(b) for a, b in (file.root.get("shared_params") or {}).items() if a != b}
    if file.root.get("shared_params") is None:
        model.aliases = _shared(model)
    return model


def _check_frozen(model: ModelTensors, name: str, shape: Shape, file: TorchFile) -> None:
    """Before stage 3, check a frozen parameter, which is stored twice: in the module and among the fragments."""
    fragments = file.root.get("frozen_param_fragments")
    fragment = fragments.get(name) if isinstance(fragments, dict) else None
    copies = [
        one for one in (model.tensors.get(name), tensor(fragment, file.path) if is_tensor(fragment) else None) if one
    ]
    for one in copies:
        if one.shape != shape or one.dtype != copies[0].dtype:
            raise CorruptError(
                f"frozen parameter `{printable(name)}` is {one.dtype.name} {list(one.shape)}, but listed as "
                f"{list(shape)}",
                where=file.path,
            )
    if copies:
        distinct = len(copies) == 2 and _file_blob(copies[0]) != _file_blob(copies[1])
        model.tensors[name] = with_replicas(copies) if distinct else copies[0]


def non_tensor_items(file: TorchFile, prefix: str = "") -> dict[str, Value]:
    """The items of a model's or layer's state dict that are no tensors, such as the extra states of its modules."""
    module = file.root if prefix else file.root.get("module") or {}
    return {f"{prefix}{name}": value for name, value in module.items() if not is_tensor(value)}


def differing_buffers(files: Sequence[TorchFile]) -> dict[Path, dict[str, Value]]:
    """By file, at stage 3: the buffers of a rank that differ from the first rank's, such as running means."""
    buffers = {str(name) for name in files[0].root.get("buffer_names") or ()}
    first = dict(_tensors(files[0].root.get("module") or {}))
    differing: dict[Path, dict[str, Value]] = {}
    with Reader(check=False) as reader:
        for file in files[1:]:
            own = dict(_tensors(file.root.get("module") or {}))
            for name in sorted(buffers & own.keys()):
                if name not in first or not _equal(first[name], own[name], files[0], file, reader):
                    differing.setdefault(file.path, {})[name] = own[name]
    return differing


def _equal(one: Value, other: Value, first: TorchFile, file: TorchFile, reader: Reader) -> bool:
    """Have two tensors the same values? Large ones are compared by checksum; without a checksum they are different."""
    a, b = tensor(one, first.path), tensor(other, file.path)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.nbytes <= _MAX_COMPARED_BYTES:
        return read(a, reader).tobytes() == read(b, reader).tobytes()
    seals = [raw.seal if raw is not None else None for raw in map(_file_blob, (a, b))]
    digests = {(seal.kind, seal.digest) for seal in seals if seal is not None and seal.nbytes == a.nbytes}
    return None not in seals and len(digests) == 1


def read_layers(files: Mapping[tuple[int, int], TorchFile], tp_rank: int, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of pipeline layers, by the optimizer's `names`."""
    tensors: dict[str, Tensor] = {}
    tied = {layer: key for key, layers in tied_layers(files, names).items() for layer in layers}
    for (layer, rank), file in sorted(files.items()):
        if rank == tp_rank:
            prefix = f"tied_modules.{tied[layer]}" if layer in tied else str(layer)
            for key, value in _tensors(file.root):
                name = f"{prefix}.{key}"
                stored_name = name if name in names or layer not in tied else f"{layer}.{key}"
                tensors.setdefault(stored_name, tensor(value, file.path))
    return tensors


def tied_layers(files: Mapping[tuple[int, int], TorchFile], names: Sequence[str]) -> dict[str, list[int]]:
    """The layers of each tied module. A layer's file does not state it; its keys are compared with the optimizer's."""
    plain = {name.partition(".")[0] for name in names}
    tied: dict[str, set[str]] = {}
    for name in names:
        if name.startswith("tied_modules.") and name.count(".") > 1:
            _, key, rest = name.split(".", 2)
            tied.setdefault(key, set()).add(rest)
    layers: dict[str, list[int]] = {}
    for (layer, rank), file in sorted(files.items()):
        if rank == 0 and str(layer) not in plain:
            keys = {key for key, _ in _tensors(file.root)}
            module = next((key for key, rests in tied.items() if rests <= keys), None)
            if module is not None:
                layers.setdefault(module, []).append(layer)
    return layers


def read_experts(files: Mapping[tuple[int, int, int], TorchFile], mp_rank: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of the experts of a rank, by name. The names have the numbers of experts in the model."""
    for (mp, _, _), file in sorted(files.items()):
        if mp == mp_rank:
            for name, value in _tensors(file.root):
                yield name, tensor(value, file.path)


def with_aliases(weights: ModelTensors) -> dict[str, Tensor]:
    """The tensors without those of aliases. If an alias has a copy of its own, it becomes a replica to compare."""
    tensors = {name: one for name, one in weights.tensors.items() if name not in weights.aliases}
    for alias, name in weights.aliases.items():
        copy, real = weights.tensors.get(alias), tensors.get(name)
        if copy is not None and real is not None and _file_blob(copy) != _file_blob(real) and copy.shape == real.shape:
            tensors[name] = with_replicas([real, copy])
    return tensors


def _tensors(module: Value) -> Iterator[tuple[str, Value]]:
    for name, value in module.items():
        if is_tensor(value):
            yield str(name), value


def _shared(weights: ModelTensors) -> dict[str, str]:
    """Names whose tensors are the same bytes as those of an earlier name, with that name."""
    first: dict[object, str] = {}
    aliases = {}
    for name, one in weights.tensors.items():
        if one.size and (blob := _file_blob(one)) is not None and first.setdefault(blob, name) != name:
            aliases[name] = first[blob]
    return aliases


def _file_blob(one: Tensor) -> FileBlob | None:
    blob = one.fragments[0].blob if one.fragments else None
    return blob if isinstance(blob, FileBlob) else None
