"""The model's own tensors: weights in the model's precision, frozen parameters, buffers, and which are tied."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import FileBlob, Tensor, read, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.deepspeed.lookups import get, is_tensor, shape_of, tensor, vector
from ckpt_formats.engines.deepspeed.zero3 import sliced

_MOST_COMPARED = 1 << 20
"""Bytes of a buffer that are read to compare ranks."""


@dataclass
class ModelTensors:
    """Tensors by name, in the local shape of one model-parallel rank."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """The module's own order of names."""
    frozen: frozenset[str] | None = None
    """The names of frozen parameters, where the file lists them."""

    def may_be_frozen(self, name: str) -> bool:
        return self.frozen is None or name in self.frozen or name not in self.order


def model_dtype(config: Mapping[str, Value]) -> DType:
    """The precision the model computes in, as the run's configuration has it."""
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled"):
            return DTYPES[name]
    return DTYPES["float32"]


def read_module(files: Sequence[TorchFile], stage3: bool) -> ModelTensors:
    """What the model files of one model-parallel rank hold: one file, or with stage 3 that of every rank."""
    file = files[0]
    found = ModelTensors()
    module = file.root.get("module") or {}
    buffers = {str(name) for name in file.root.get("buffer_names") or ()}
    for name, value in _tensors(module):
        found.order.append(name)
        if stage3 and name not in buffers and not value.size:
            continue  # stage 3 leaves an empty place holder
        found.tensors[name] = tensor(value, file.path)
        if name in buffers:
            found.buffers.add(name)
    frozen = file.root.get("frozen_param_shapes")
    found.frozen = None if frozen is None else frozenset(map(str, frozen))
    for name, listed in (frozen or {}).items():
        shape = shape_of(listed, file.path)
        if stage3:
            slices = [vector(get(f.root["frozen_param_fragments"], name, object, f.path), f.path) for f in files]
            found.tensors[str(name)] = sliced(shape, slices) if prod(shape) else Tensor(shape, slices[0].dtype, ())
        else:
            _check_frozen(found, str(name), shape, file)
    found.aliases = {str(a): str(b) for a, b in (file.root.get("shared_params") or {}).items() if a != b}
    if file.root.get("shared_params") is None:
        found.aliases = _shared(found)
    return found


def _check_frozen(found: ModelTensors, name: str, shape: Shape, file: TorchFile) -> None:
    """Before stage 3 a frozen parameter is in the module, and again among the fragments: the same values twice."""
    fragments = file.root.get("frozen_param_fragments")
    again = fragments.get(name) if isinstance(fragments, dict) else None
    copies = [one for one in (found.tensors.get(name), tensor(again, file.path) if is_tensor(again) else None) if one]
    for one in copies:
        if one.shape != shape or one.dtype != copies[0].dtype:
            raise Corrupt(
                f"frozen parameter `{printable(name)}` is {one.dtype.name} {list(one.shape)}, but listed as "
                f"{list(shape)}",
                where=file.path,
            )
    if copies:
        distinct = len(copies) == 2 and _place(copies[0]) != _place(copies[1])
        found.tensors[name] = with_replicas(copies) if distinct else copies[0]


def others_in(file: TorchFile, prefix: str = "") -> dict[str, Value]:
    """What a model's or layer's state dict holds that is no tensor, such as the extra states of its modules."""
    module = file.root if prefix else file.root.get("module") or {}
    return {f"{prefix}{name}": value for name, value in module.items() if not is_tensor(value)}


def own_buffers(files: Sequence[TorchFile]) -> dict[Path, dict[str, Value]]:
    """Stage 3: the buffers that a data-parallel rank has otherwise than the first, such as running means."""
    buffers = {str(name) for name in files[0].root.get("buffer_names") or ()}
    first = dict(_tensors(files[0].root.get("module") or {}))
    found: dict[Path, dict[str, Value]] = {}
    with Reader(check=False) as reader:
        for file in files[1:]:
            own = dict(_tensors(file.root.get("module") or {}))
            for name in sorted(buffers & own.keys()):
                if name not in first or not _equal(first[name], own[name], files[0], file, reader):
                    found.setdefault(file.path, {})[name] = own[name]
    return found


def _equal(one: Value, other: Value, first: TorchFile, file: TorchFile, reader: Reader) -> bool:
    """The same values? Large ones are compared by their checksums, and without any count as different."""
    a, b = tensor(one, first.path), tensor(other, file.path)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.nbytes <= _MOST_COMPARED:
        return read(a, reader).tobytes() == read(b, reader).tobytes()
    seals = [raw.seal if raw is not None else None for raw in map(_place, (a, b))]
    marks = {(seal.kind, seal.digest) for seal in seals if seal is not None and seal.nbytes == a.nbytes}
    return None not in seals and len(marks) == 1


def read_layers(files: Mapping[tuple[int, int], TorchFile], tp_rank: int, names: Sequence[str]) -> dict[str, Tensor]:
    """Pipeline layers, by the optimizer's names."""
    found: dict[str, Tensor] = {}
    tied = {layer: key for key, layers in tied_layers(files, names).items() for layer in layers}
    for (layer, rank), file in sorted(files.items()):
        if rank == tp_rank:
            prefix = f"tied_modules.{tied[layer]}" if layer in tied else str(layer)
            for key, value in _tensors(file.root):
                name = f"{prefix}.{key}"
                kept = name if name in names or layer not in tied else f"{layer}.{key}"
                found.setdefault(kept, tensor(value, file.path))
    return found


def tied_layers(files: Mapping[tuple[int, int], TorchFile], names: Sequence[str]) -> dict[str, list[int]]:
    """Which layers are which tied module. A layer's file does not tell; its keys do, beside those of the optimizer."""
    plain = {name.partition(".")[0] for name in names}
    tied: dict[str, set[str]] = {}
    for name in names:
        if name.startswith("tied_modules.") and name.count(".") > 1:
            _, key, rest = name.split(".", 2)
            tied.setdefault(key, set()).add(rest)
    found: dict[str, list[int]] = {}
    for (layer, rank), file in sorted(files.items()):
        if rank == 0 and str(layer) not in plain:
            keys = {key for key, _ in _tensors(file.root)}
            module = next((key for key, rests in tied.items() if rests <= keys), None)
            if module is not None:
                found.setdefault(module, []).append(layer)
    return found


def read_experts(files: Mapping[tuple[int, int, int], TorchFile], mp_rank: int) -> Iterator[tuple[str, Tensor]]:
    """Weights of the experts, under their global numbers."""
    for (mp, _, _), file in sorted(files.items()):
        if mp == mp_rank:
            for name, value in _tensors(file.root):
                yield name, tensor(value, file.path)


def with_aliases(weights: ModelTensors) -> dict[str, Tensor]:
    """The tensors without their other names, whose copies, where they are copies, are kept for comparison."""
    kept = {name: one for name, one in weights.tensors.items() if name not in weights.aliases}
    for alias, name in weights.aliases.items():
        copy, real = weights.tensors.get(alias), kept.get(name)
        if copy is not None and real is not None and _place(copy) != _place(real) and copy.shape == real.shape:
            kept[name] = with_replicas([real, copy])
    return kept


def _tensors(module: Value) -> Iterator[tuple[str, Value]]:
    for name, value in module.items():
        if is_tensor(value):
            yield str(name), value


def _shared(weights: ModelTensors) -> dict[str, str]:
    """Names that lie on the same bytes as an earlier name."""
    first: dict[object, str] = {}
    aliases = {}
    for name, one in weights.tensors.items():
        if one.size and (place := _place(one)) is not None and first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases


def _place(one: Tensor) -> FileBlob | None:
    blob = one.fragments[0].blob if one.fragments else None
    return blob if isinstance(blob, FileBlob) else None
