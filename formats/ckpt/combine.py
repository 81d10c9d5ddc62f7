"""Checkpoints computed from several others: the average of weights, and a model with a LoRA adapter merged into it.

The results are indexes, like those of all edits: a tensor is computed when it is read, block by block.
What a block's values are does not depend on how the tensor is cut into blocks.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np

from ckpt_codecs import Rounded
from ckpt_codecs.scratch import temporary_buffer
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Edit, Parameter, Role, SourceFile
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete, NotFound, Unsupported
from ckpt_formats.core.files import Reader, Seal
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import Array, Blob, DerivedBlob, Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.hf.folder import is_training_file
from ckpt_formats.engines.hf.side_files import PREFIX as _HF

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_CONFIG = "hf/config.json"
_ADAPTER_CONFIG = "hf/adapter_config.json"

_BLOCK = 1 << 16
"""Elements that are computed at once. Larger arrays leave the core's cache, and are mapped and unmapped each time."""
_TILE = 1 << 15
"""Elements of a product of matrices that are computed at once: their float64 values stay in a core's cache."""
_NAMES_IN_ERRORS = 3
_DROPPED_BITS = np.uint64((1 << 29) - 1)
"""The bits of a float64 significand which float32 does not have."""


# Averages


def ema_weights(count: int, decay: float) -> list[float]:
    """The weights that `average` needs for the exponential moving average of `count` states, the oldest first.

    The average starts at the first state; each later state changes it to `decay * average + (1 - decay) * state`.

    >>> ema_weights(3, 0.5)
    [0.25, 0.25, 0.5]
    """
    if count < 1:
        raise Unsupported("an average needs at least one checkpoint")
    if not 0 <= decay < 1:
        raise Unsupported(f"the decay of an average is at least 0 and less than 1, not {decay}")
    return [decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count))]


@dataclass(frozen=True)
class Average(Edit):
    """The mean of several checkpoints: where each is, and how it came to be."""

    sources: tuple[tuple[Path, tuple[Edit, ...]], ...]
    weights: tuple[float, ...]

    def inputs(self) -> tuple[Path, ...]:
        return tuple(path for path, _ in self.sources)


@dataclass(frozen=True)
class MergeLora(Edit):
    """An adapter merged into the weights."""

    adapter: tuple[Path, tuple[Edit, ...]]
    scale: float

    def inputs(self) -> tuple[Path, ...]:
        return (self.adapter[0],)


def average(sources: Sequence[Checkpoint], weights: Sequence[float] | None = None) -> Checkpoint:
    """The weighted mean of the models' tensors, without optimizer. All models must have the same names and shapes.

    An element is `(w0 * x0 + w1 * x1 + ...) / sum(w)`, computed in float64 from left to right, and rounded once (to
    nearest, ties to even) to the element type of the first source. NaN and infinity follow IEEE 754; a NaN is the
    positive quiet NaN. Of float64 tensors each operation rounds, so even equal values may change in the last bit.
    Integers and booleans must be equal in all sources, which is checked when they are read, but for
    `num_batches_tracked` of batch normalization: of these counters the largest is taken.

    `weights`: one finite number for each source, with a sum above zero; None: all are 1. They need not sum to 1.
    Names that are tied in all sources stay tied. Memory: a few blocks of 64 Ki elements, for any number of sources.

    Raises `Incomplete` if a source lacks tensors, `Unsupported` if shapes or kinds of elements differ.
    """
    if not sources:
        raise Unsupported("an average needs at least one checkpoint")
    numbers = _checked_weights(sources, weights)
    models = [_model_of(source) for source in sources]
    names = _shared_names(models)
    parameters: dict[str, Parameter] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[str, ...], str] = {}
    for name in names:
        holders = tuple(_holder(model, name) for model in models)
        if holders in first_name:
            aliases[name] = first_name[holders]
            continue
        first_name[holders] = name
        members = [model.parameters[holder] for model, holder in zip(models, holders, strict=True)]
        tensor = _average_tensor(name, members, numbers)
        parameters[name] = replace(members[0], name=name, states={MODEL: tensor})
    _check_shapes(models, parameters)
    untied = [name for name in models[0].aliases if name in parameters]
    steps = {source.origin.step for source in sources}
    edit = Average(tuple((source.path, source.history) for source in sources), tuple(numbers))
    return edited(
        models[0],
        edit,
        origin=replace(models[0].origin, step=steps.pop() if len(steps) == 1 else None),
        parameters=parameters,
        aliases=aliases,
        extras=_untied_config(models[0].extras) if untied else models[0].extras,
        files=_all_files(models),
        seals=_AllSeals(models),
        notices=tuple(dict.fromkeys([*(n for m in models for n in m.notices), *_average_notices(sources, parameters)])),
        digests={},
        errors={},
        identities={path: identity for model in models for path, identity in model.identities.items()},
    )


def _model_of(source: Checkpoint) -> Checkpoint:
    """The weights alone, with the files of a model of Hugging Face's: its configuration and tokenizer."""
    model = source.weights_only()
    files = {
        key: value
        for key, value in source.extras.items()
        if key.startswith(_HF) and not is_training_file(key.removeprefix(_HF))
    }
    named = {value.name for value in files.values() if isinstance(value, TensorName)}
    tensors = {name: source.parameters[name] for name in named & source.parameters.keys()}
    return replace(model, extras={**model.extras, **files}, parameters={**model.parameters, **tensors})


def _checked_weights(sources: Sequence[Checkpoint], weights: Sequence[float] | None) -> tuple[float, ...]:
    numbers = (1.0,) * len(sources) if weights is None else tuple(map(float, weights))
    if len(numbers) != len(sources):
        raise Unsupported(f"{len(sources)} checkpoints need as many weights, not {len(numbers)}")
    if not all(map(math.isfinite, numbers)) or math.fsum(numbers) <= 0:
        raise Unsupported("the weights of an average must be finite, and their sum must be above zero")
    return numbers


def _holder(model: Checkpoint, name: str) -> str:
    """The name of the parameter that has the values of `name`, which may be tied to it."""
    return name if name in model.parameters else model.aliases[name]


def _shared_names(models: Sequence[Checkpoint]) -> list[str]:
    """All names of the models' tensors, tied ones last. Raises `Incomplete` if not all models have them."""
    all_names = [
        dict.fromkeys([*m.parameters, *(a for a, n in m.aliases.items() if n in m.parameters)]) for m in models
    ]
    for model, names in zip(models[1:], all_names[1:], strict=True):
        for owner, other, absent in (
            (models[0], model, [name for name in all_names[0] if name not in names]),
            (model, models[0], [name for name in names if name not in all_names[0]]),
        ):
            if absent:
                raise Incomplete(
                    f"it lacks {len(absent)} tensors of {owner.path}: {_some(absent)}",
                    where=other.path,
                    hint="Only checkpoints of one model can be averaged: their tensors must have the same names.",
                )
    return list(all_names[0])


def _check_shapes(models: Sequence[Checkpoint], parameters: Mapping[str, Parameter]) -> None:
    for model in models[1:]:
        pairs = [(n, p.weight, model.parameters[_holder(model, n)].weight) for n, p in parameters.items()]
        different = [
            f"{printable(name)} {list(b.shape)} instead of {list(a.shape)}"
            for name, a, b in pairs
            if a.shape != b.shape
        ]
        if different:
            raise Unsupported(
                f"{len(different)} tensors have other shapes than those of {models[0].path}: {_some(different)}",
                where=model.path,
            )
        mixed = [name for name, a, b in pairs if not _can_average(a.dtype) and a.dtype != b.dtype]
        mixed += [name for name, a, b in pairs if _can_average(a.dtype) and not _can_average(b.dtype)]
        if mixed:
            raise Unsupported(
                f"{len(mixed)} tensors have other kinds of elements than those of {models[0].path}: {_some(mixed)}",
                where=model.path,
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_IN_ERRORS:,} more" if len(names) > _NAMES_IN_ERRORS else ""
    return ", ".join(map(printable, names[:_NAMES_IN_ERRORS])) + more


def _can_average(dtype: DType) -> bool:
    """Is it a type of real or complex numbers, not of counts, flags or exponents of scales?"""
    return (is_float(dtype) and dtype.name != "float8_e8m0fnu") or dtype.kind == "c"


def _average_tensor(name: str, members: Sequence[Parameter], weights: tuple[float, ...]) -> Tensor:
    tensors = tuple(member.weight for member in members)
    if _can_average(tensors[0].dtype):
        return Tensor.of(AverageBlob(tensors, weights, tensors[0].dtype))
    return Tensor.of(EqualBlob(tensors, name, name.rpartition(".")[2] == "num_batches_tracked"))


def _average_notices(sources: Sequence[Checkpoint], parameters: Mapping[str, Parameter]) -> Iterator[Notice]:
    yield from _dropped_notices(sources)
    small = [name for name, p in parameters.items() if p.weight.dtype.itemsize == 1 and _can_average(p.weight.dtype)]
    if small:
        text = "8-bit floats are averaged as they are stored: this is wrong if other tensors hold scales for them"
        yield Notice(text, tuple(small), Weight.UNSURE)
    counters = [
        name
        for name, p in parameters.items()
        for f in p.weight.fragments
        if isinstance(f.blob, EqualBlob) and f.blob.largest
    ]
    if counters:
        yield Notice("counters of batches are not averaged: the largest is taken", tuple(counters))


def _dropped_notices(sources: Sequence[Checkpoint]) -> Iterator[Notice]:
    """Notices: the optimizers' states are dropped; the weights are approximate."""
    every = (item for source in sources for item in source.tensors() if item[0].role != "extra")
    states = dict.fromkeys(state for parameter, state, tensor in every if tensor is not parameter.weight)
    if states or any(source.groups for source in sources):
        yield Notice(
            "only weights are combined; the optimizer's states are not in the result", tuple(states), Weight.LOST
        )
    if any(source.errors for source in sources):
        yield Notice("some of the weights are approximate: they were coded with loss", weight=Weight.UNSURE)


def _all_files(models: Sequence[Checkpoint]) -> tuple[SourceFile, ...]:
    """The files of all checkpoints, each once."""
    return tuple({file.path: file for model in models for file in model.files}.values())


class _AllSeals(Sequence[Seal]):
    """The checksums of several checkpoints. They are evaluated when they are needed: some must be read from files."""

    def __init__(self, models: Sequence[Checkpoint]) -> None:
        self._parts = tuple(model.seals for model in models)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Seal]:
        return chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, index: int) -> Seal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Seal]: ...
    def __getitem__(self, index: int | slice) -> Seal | Sequence[Seal]:
        return tuple(self)[index]


def _untied_config(extras: Mapping[str, Value]) -> dict[str, Value]:
    """The extras with a model configuration that ties no embeddings."""
    config = extras.get(_CONFIG)
    if not isinstance(config, dict):
        return dict(extras)
    config = {**config, "tie_word_embeddings": False}
    inner = config.get("text_config")
    if isinstance(inner, dict) and "tie_word_embeddings" in inner:
        config["text_config"] = {**inner, "tie_word_embeddings": False}
    return {**extras, _CONFIG: config}


@dataclass(frozen=True)
class AverageBlob(Blob):
    """The weighted mean of blobs of one shape: float64 arithmetic from left to right, rounded once to `dtype`.

    The blobs may differ in element type. Complex numbers are pairs of real ones.
    """

    blobs: tuple[Blob, ...]
    weights: tuple[float, ...]
    dtype: DType

    @property
    def shape(self) -> Shape:
        return self.blobs[0].shape

    def parts(self) -> tuple[Blob, ...]:
        return self.blobs

    def crop(self, box: Box) -> "AverageBlob":
        return AverageBlob(tuple(blob.crop(box) for blob in self.blobs), self.weights, self.dtype)

    def read_into(self, out: Array, reader: Reader) -> None:
        total_weight = math.fsum(self.weights)
        for box in slabs(self.shape, _BLOCK):
            total: Array | None = None
            for blob, weight in zip(self.blobs, self.weights, strict=True):
                with np.errstate(all="ignore"):
                    term = _as_float64(read(blob.crop(box), reader), self.dtype.kind == "c")
                    term *= weight
                    total = term if total is None else np.add(total, term, out=total)
            assert total is not None
            with np.errstate(all="ignore"):
                total /= total_weight
            out[box.index] = _from_float64(total, self.dtype).reshape(box.shape)


def _as_float64(values: Array, pairs: bool) -> Array:
    """The values as a new vector of float64; of complex numbers (`pairs`), real and imaginary parts in turn."""
    if pairs:
        return values.astype(np.complex128).reshape(-1).view(np.float64)
    return values.reshape(-1).astype(np.float64)


def _from_float64(values: Array, dtype: DType) -> Array:
    """A vector of float64 rounded once to `dtype`; for a complex type, pairs of real numbers become one."""
    if dtype.kind != "c":
        return round_once(values, dtype)
    return round_once(values, np.dtype(f"float{4 * dtype.itemsize}")).view(dtype)


def round_once(values: Array, dtype: DType) -> Array:
    """Float64 values rounded to nearest, ties to even, to another float type. NaNs become positive and quiet.

    NumPy and ml_dtypes go from float64 to the short types by way of float32, which rounds twice. Here the step to
    float32 rounds to odd, after which the second rounding gives the right result: float32 has at least two bits more
    than each of the short types (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).

    values: float64, of any shape. Returns an array of `dtype`, of the same shape.
    """
    with np.errstate(all="ignore"):
        if np.isnan(values).any():
            values = np.where(np.isnan(values), np.float64(np.nan), values)
        if dtype.itemsize >= 4:
            return values.astype(dtype)
        return Rounded().decode(b"", values.shape, dtype, _round_to_odd(values))


def _round_to_odd(values: Array) -> Array:
    """Float64 values as float32: an inexact one becomes that of its two float32 neighbours whose last bit is 1.

    Values beyond the largest float32 become infinite, which the short types round alike.
    """
    bits = values.view(np.uint64)
    odd = bits & _DROPPED_BITS
    odd += _DROPPED_BITS  # carries into the last bit that stays if any dropped bit is 1
    odd |= bits
    odd &= ~_DROPPED_BITS
    result = odd.view(np.float64).astype(np.float32)
    tiny = np.abs(values) < 2.0**-126
    if tiny.any():  # float32 has fewer bits here: multiples of 2**-149
        scaled = values[tiny] * 2.0**149
        whole = np.trunc(scaled)
        is_even = (whole != scaled) & (whole % 2 == 0)
        result[tiny] = np.where(is_even, whole + np.copysign(1, scaled), whole) * 2.0**-149
    return result


@dataclass(frozen=True)
class EqualBlob(Blob):
    """Values that are equal in several blobs of one shape and element type; or the largest of each, for counters.

    Reading raises `Unsupported` if the values differ.
    """

    blobs: tuple[Blob, ...]
    name: str
    largest: bool = False

    @property
    def shape(self) -> Shape:
        return self.blobs[0].shape

    @property
    def dtype(self) -> DType:
        return self.blobs[0].dtype

    def parts(self) -> tuple[Blob, ...]:
        return self.blobs

    def crop(self, box: Box) -> "EqualBlob":
        return EqualBlob(tuple(blob.crop(box) for blob in self.blobs), self.name, self.largest)

    def read_into(self, out: Array, reader: Reader) -> None:
        for box in slabs(self.shape, _BLOCK):
            result = read(self.blobs[0].crop(box), reader)
            for blob in self.blobs[1:]:
                values = read(blob.crop(box), reader)
                if self.largest:
                    np.maximum(result, values, out=result)
                elif values.tobytes() != result.tobytes():
                    raise Unsupported(
                        f"`{printable(self.name)}` holds {self.dtype.name} values which differ between the "
                        "checkpoints: they have no average",
                        hint="Leave the tensor out: `select(skip=...)`, or --skip.",
                    )
            out[box.index] = result


# LoRA

_LORA_NAME = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)
_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer."

_USED = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out"}
_USED |= {"modules_to_save", "bias", "init_lora_weights"}
_WITHOUT_EFFECT = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"}
_WITHOUT_EFFECT |= {"layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"}
_WITHOUT_EFFECT |= {"revision", "runtime_config", "target_modules", "task_type", "eva_config"}
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of adapters which leave the model's own weights as they are. PiSSA, OLoRA, LoftQ and others do not."""
_MODEL_TYPES = ("float16", "bfloat16", "float32", "float64")


def merge_lora(model: Checkpoint, adapter: Checkpoint, scale: float | None = None) -> Checkpoint:
    """The weights of `model` with a LoRA adapter of PEFT merged into them, as its `merge_and_unload()` does.

    LoRA, rsLoRA and DoRA of linear, `Conv1D` (GPT-2), embedding and convolution layers, `rank_pattern`,
    `alpha_pattern`, `modules_to_save` and `bias`. `scale` multiplies the scale of each low-rank update (which is
    `lora_alpha / r`); None: 1. Tensors that the adapter holds in full replace those of the model.

    Arithmetic: `B @ A` is summed over the rank in ascending order; each product and sum is formed in float64 and
    rounded to float32, like a fused multiply-add. Then come the scale, the model's weight and DoRA's factor, in
    float32, and one rounding to the weight's own type. PEFT does the same with the adapter in float32, its default.
    Only the order in which its matrix product adds is not specified; where it is the same, results are equal bit by
    bit; PEFT's merge on a CPU adds in that order up to rank 192 at least, where this was tried. Two things differ:
    DoRA's norm is a float32 sum in PEFT and a float64 sum here, so a weight with n inputs may differ by its
    (n + 8) * 2**-24th part; and PEFT rounds the update of a 16-bit embedding once more, before it adds it. Weights in
    float64 are computed in float64.

    Reading a block reads the same block of the weight, and of A and B the columns and rows that belong to it. DoRA
    also reads, once for each output, all weights that lead to it. Memory: these parts of A and B, and a few blocks of
    64 Ki elements.

    A weight that is tied to another in the model gets values of its own if only one of the two is adapted.

    Raises `Unsupported` for another kind of adapter or an option that is not known, `Incomplete` if the model has no
    weight for a module of the adapter, or the adapter lacks a tensor, `NotFound` if there is no configuration.
    """
    if scale is not None and not math.isfinite(scale):
        raise Unsupported("the scale of an adapter must be finite")
    config = _adapter_config(adapter)
    base = _model_of(model)
    base = replace(base, aliases={alias: name for alias, name in base.aliases.items() if name in base.parameters})
    updates, full = _adapter_tensors(adapter)
    prefix = _prefix_change(adapter, updates, full, base)
    merge = _Merge(base, adapter, config, prefix, 1.0 if scale is None else float(scale))
    new = {**merge.full_tensors(full), **merge.updated_weights(updates, full)}
    parameters = dict(base.parameters)
    aliases = dict(base.aliases)
    untied = []
    for alias, name in base.aliases.items():
        if alias in new or name in new:
            untied.append(alias)
            del aliases[alias]
            shared = merge.base_weight(base.parameters[name].weight, name, full)
            parameters[alias] = replace(base.parameters[name], name=alias, states={MODEL: shared})
    for name, tensor in new.items():
        role: Role = parameters[name].role if name in parameters else "parameter"
        parameters[name] = Parameter(name, role, {MODEL: tensor})
    added = [name for name in new if name not in base.parameters and name not in base.aliases]
    unchanged = {name for name, p in model.parameters.items() if name not in new and MODEL in p.states}
    notices = [*_dropped_notices([model]), *_merge_notices(untied, added, scale, full)]
    edit = MergeLora((adapter.path, adapter.history), 1.0 if scale is None else float(scale))
    return edited(
        base,
        edit,
        parameters=parameters,
        aliases=aliases,
        extras=_untied_config(base.extras) if untied else base.extras,
        files=_all_files([base, adapter]),
        seals=_AllSeals([base, adapter]),
        notices=tuple(dict.fromkeys((*base.notices, *notices))),
        digests={key: value for key, value in base.digests.items() if key[0] in unchanged and key[1] == MODEL},
        errors={key: value for key, value in base.errors.items() if key[0] in unchanged and key[1] == MODEL},
        identities={**base.identities, **adapter.identities},
    )


def _merge_notices(
    untied: Sequence[str], added: Sequence[str], scale: float | None, full: Mapping[str, Tensor]
) -> Iterator[Notice]:
    if untied:
        text = "tied to another weight in the model; now stored apart, since the adapter changes only one of the two"
        yield Notice(text, tuple(untied), Weight.UNSURE)
    if added:
        yield Notice("tensors of the adapter which the model does not have", tuple(added))
    if full and scale not in (None, 1):
        yield Notice("tensors that the adapter holds in full are not scaled", tuple(full), Weight.UNSURE)


def _adapter_config(adapter: Checkpoint) -> Mapping[str, Value]:
    """The adapter's configuration. Raises `Unsupported` if it has options that are not known to leave weights alone."""
    config = adapter.extras.get(_ADAPTER_CONFIG)
    if not isinstance(config, dict):
        raise NotFound("there is no adapter_config.json", where=adapter.path, hint="Name the folder of a PEFT adapter.")
    if config.get("peft_type") != "LORA":
        raise _refusal(adapter, f"adapters of the type {_shown(config.get('peft_type'))} are not merged, only LORA")
    initial = config.get("init_lora_weights", True)
    if not any(initial is value or (isinstance(initial, str) and initial == value) for value in _INITIAL):
        raise _refusal(
            adapter,
            f"`init_lora_weights` is {_shown(initial)}: this method changes the model's own weights before training",
            "PEFT can save such an adapter as a plain one: see `path_initial_model_for_weight_conversion`.",
        )
    unknown = [key for key, value in config.items() if key not in _USED | _WITHOUT_EFFECT and value]
    if unknown:
        raise _refusal(adapter, f"options of the adapter which are not supported: {_some(unknown)}")
    return config


def _refusal(
    adapter: Checkpoint, message: str, hint: str = "Merge it with PEFT's own merge_and_unload()."
) -> CkptError:
    return Unsupported(message, where=adapter.path, hint=hint)


def _shown(value: Value) -> str:
    return printable(repr(value)[:60])


_Update = dict[str, Tensor]
"""The tensors of one low-rank update by kind, such as `lora_A`: (rank, in...), (out, rank, 1...), and magnitudes."""


def _adapter_tensors(adapter: Checkpoint) -> tuple[dict[str, _Update], dict[str, Tensor]]:
    """Low-rank updates by module, and full tensors by name; both as PEFT names them, without its prefix."""
    updates: dict[str, _Update] = {}
    full: dict[str, Tensor] = {}
    unknown: list[str] = []
    for stored, parameter in adapter.parameters.items():
        if parameter.role == "extra":
            continue
        name = stored.removeprefix(_PREFIX)
        match = _LORA_NAME.fullmatch(name)
        if match is not None:
            updates.setdefault(match["module"], {})[match["kind"]] = parameter.weight
        elif ".lora_" in name or ".modules_to_save." in name or ".token_adapter." in name:
            unknown.append(stored)
        else:
            full[name] = parameter.weight
    if unknown:
        bias = " (the adapter was trained with `lora_bias`)" if any(n.endswith("lora_B.bias") for n in unknown) else ""
        raise _refusal(adapter, f"{len(unknown)} tensors of the adapter are not known: {_some(unknown)}{bias}")
    if not updates and not full:
        raise Incomplete("the adapter holds no tensors", where=adapter.path)
    return updates, full


@dataclass(frozen=True)
class _PrefixChange:
    """How names of the adapter become names of the model: without the prefix `drop`, with the prefix `add`."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)


def _prefix_change(
    adapter: Checkpoint, updates: Mapping[str, _Update], full: Mapping[str, Tensor], base: Checkpoint
) -> _PrefixChange:
    """The one change of prefixes by which the model has all weights that the adapter changes.

    A model with a head may lack the prefix of its inner model, or the other way round (`transformer.h.0`, `h.0`).
    Raises `Incomplete` if there is no such change, `Unsupported` if there are several.
    """
    weights = [f"{module}.weight" for module in updates] or [name.replace(_BASE_LAYER, ".") for name in full]
    names = {*base.parameters, *base.aliases}
    first = weights[0].partition(".")[0] + "."
    added = {name.removesuffix(weights[0]) for name in names if name.endswith(f".{weights[0]}")}
    for changes in ([_PrefixChange()], [_PrefixChange(drop=first)], [_PrefixChange(add=add) for add in sorted(added)]):
        fitting = [change for change in changes if all(change(weight) in names for weight in weights)]
        if len(fitting) > 1:
            shown = [change(weights[0]) for change in fitting]
            raise _refusal(adapter, f"`{printable(weights[0])}` could be several weights of the model: {_some(shown)}")
        if fitting:
            return fitting[0]
    if not updates:
        return _PrefixChange()
    absent = [weight for weight in weights if weight not in names]
    raise Incomplete(
        f"it has no weights for {len(absent)} modules of the adapter: {_some(absent)}",
        where=base.path,
        hint="Is this the model that the adapter was trained for?",
    )


@dataclass(frozen=True)
class _Merge:
    """One merge: a model, an adapter, and what the adapter's configuration states."""

    base: Checkpoint
    adapter: Checkpoint
    config: Mapping[str, Value]
    prefix: _PrefixChange
    scale: float

    def full_tensors(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that replace those of the model, by the model's names."""
        saved = self.config.get("modules_to_save") or ()
        if not isinstance(saved, (list, tuple)):
            raise Corrupt("`modules_to_save` is not a list", where=self.adapter.path)
        result: dict[str, Tensor] = {}
        unknown = []
        for stored, tensor in full.items():
            name = self.prefix(stored.replace(_BASE_LAYER, "."))
            if name in result:
                raise self._ambiguous(name)
            if name in self.base.parameters or name in self.base.aliases:
                current = self.base.parameters[_holder(self.base, name)].weight
                if current.shape != tensor.shape:
                    raise Unsupported(
                        f"`{printable(name)}` has the shape {list(tensor.shape)} in the adapter and "
                        f"{list(current.shape)} in the model",
                        where=self.adapter.path,
                        hint="If tokens were added to the vocabulary, resize the model's embeddings first.",
                    )
                if tensor.dtype != current.dtype and not (is_float(tensor.dtype) and is_float(current.dtype)):
                    raise _refusal(
                        self.adapter,
                        f"`{printable(name)}` holds {tensor.dtype.name} values in the adapter and "
                        f"{current.dtype.name} values in the model",
                    )
                result[name] = _as_type(tensor, current.dtype)
            elif any(f".{printable(str(module))}." in f".{name}" for module in saved):
                result[name] = tensor
            else:
                unknown.append(stored)
        if unknown:
            raise _refusal(self.adapter, f"{len(unknown)} tensors of the adapter are not known: {_some(unknown)}")
        return result

    def _ambiguous(self, name: str) -> CkptError:
        return _refusal(self.adapter, f"two tensors of the adapter are meant for `{printable(name)}`")

    def base_weight(self, weight: Tensor, name: str, full: Mapping[str, Tensor]) -> Tensor:
        """The weight of the model that an update is added to: the copy in the adapter, if there is one."""
        for stored, tensor in full.items():
            if _BASE_LAYER in stored and self.prefix(stored.replace(_BASE_LAYER, ".")) == name:
                return _as_type(tensor, weight.dtype)
        return weight

    def updated_weights(self, updates: Mapping[str, _Update], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights with their low-rank updates, by the model's names."""
        result: dict[str, Tensor] = {}
        for module, update in updates.items():
            name = self.prefix(f"{module}.weight")
            if name in result:
                raise self._ambiguous(name)
            weight = self.base.parameters[_holder(self.base, name)].weight
            if weight.dtype.name not in _MODEL_TYPES:
                raise _refusal(
                    self.adapter,
                    f"`{printable(name)}` of the model holds {weight.dtype.name} values, to which nothing can be added",
                    "Merge the adapter into the model before its weights are quantized.",
                )
            weight = self.base_weight(weight, name, full)
            result[name] = self._updated(module, name, weight, update)
        return result

    def _updated(self, module: str, name: str, weight: Tensor, update: _Update) -> Tensor:
        is_embedding = "lora_embedding_A" in update or "lora_embedding_B" in update
        infix = "embedding_" if is_embedding else ""
        expected = {f"lora_{infix}A", f"lora_{infix}B"}
        if self.config.get("use_dora"):
            expected.add("lora_magnitude_vector")
        if absent := sorted(expected - update.keys()):
            raise Incomplete(f"module `{printable(module)}` lacks {_some(absent)}", where=self.adapter.path)
        if surplus := sorted(update.keys() - expected):
            raise _refusal(self.adapter, f"module `{printable(module)}` has {_some(surplus)} without need")
        a, b = update[f"lora_{infix}A"], update[f"lora_{infix}B"]
        magnitude = update.get("lora_magnitude_vector")
        for tensor in update.values():
            if tensor.dtype.name not in _MODEL_TYPES:
                raise _refusal(self.adapter, f"module `{printable(module)}` holds {tensor.dtype.name} values")
        transposed = self._is_transposed(name, weight, a, b, is_embedding)
        rank = a.shape[0]
        if magnitude is not None and magnitude.size != b.shape[0]:
            raise Corrupt(
                f"module `{printable(module)}` has {magnitude.size} magnitudes for {b.shape[0]} outputs",
                where=self.adapter.path,
            )
        scale = self._module_scale(module, rank)
        return Tensor.of(merged_blob(weight, a, b, scale, transposed, magnitude))

    def _module_scale(self, module: str, rank: int) -> float:
        """The factor of `B @ A`: `lora_alpha / r`, or `lora_alpha / sqrt(r)` for rsLoRA, times the user's factor."""
        stated = self._pattern_value("rank_pattern", "r", module)
        alpha = self._pattern_value("alpha_pattern", "lora_alpha", module)
        if stated != rank or rank < 1:
            raise _refusal(
                self.adapter,
                f"module `{printable(module)}` has rank {rank}, but adapter_config.json states {stated}",
            )
        # The order of operations is that of PEFT's `set_scale`.
        return self.scale * alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern_value(self, patterns: str, default: str, module: str) -> float:
        """The number that the first fitting pattern gives to a module, as in PEFT's `get_pattern_key`."""
        table = self.config.get(patterns) or {}
        value = self.config.get(default)
        if not isinstance(table, dict):
            raise Corrupt(f"`{patterns}` is not a table", where=self.adapter.path)
        for pattern, number in table.items():
            if _module_pattern(pattern, f"{self.adapter.path}: {patterns}").match(module):
                value = number
                break
        with suppress(OverflowError):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                return value
        raise Corrupt(f"`{default}` is not a number: {_shown(value)}", where=self.adapter.path)

    def _is_transposed(self, name: str, weight: Tensor, a: Tensor, b: Tensor, is_embedding: bool) -> bool:
        """Is the weight stored as (in, out)? Raises `Unsupported` if the shapes do not fit, or allow both layouts."""
        shape, inner, outer = weight.shape, a.shape[1:], b.shape[0] if b.shape else 0
        if len(shape) >= 2 and len(a.shape) == len(shape) and b.shape == (outer, a.shape[0], *(1 for _ in shape[2:])):
            plain = shape == (outer, *inner) and not is_embedding
            transposed = shape == (*inner, outer) and len(shape) == 2
            if plain and transposed:
                return self._is_square_transposed(name)
            if plain or transposed:
                return transposed
        raise _refusal(
            self.adapter,
            f"`{printable(name)}` has the shape {list(shape)}, to which an update of {list(b.shape)} times "
            f"{list(a.shape)} cannot be added",
        )

    def _is_square_transposed(self, name: str) -> bool:
        """The layout of a square weight: that of modules of the same last name, by their biases; else as configured.

        PEFT's `fan_in_fan_out` is that of the module which it adapted last.
        """
        module = name.removesuffix(".weight").rpartition(".")[2]
        layouts = set()
        for other, parameter in self.base.parameters.items():
            shape = parameter.weight.shape
            if len(shape) != 2 or shape[0] == shape[1] or not f".{other}".endswith(f".{module}.weight"):
                continue
            bias = self.base.parameters.get(f"{other.removesuffix('.weight')}.bias")
            if bias is not None and len(bias.weight.shape) == 1 and bias.weight.shape[0] in shape:
                layouts.add(bias.weight.shape[0] == shape[1])
        if len(layouts) > 1:
            raise _refusal(self.adapter, f"`{printable(name)}` is square: whether it is stored as (in, out) is unknown")
        return layouts.pop() if layouts else bool(self.config.get("fan_in_fan_out"))


@lru_cache(4096)
def _module_pattern(pattern: str, origin: str) -> re.Pattern[str]:
    """A key of `rank_pattern` or `alpha_pattern` as PEFT reads it. Raises `BadRules` or `Unsafe`."""
    return re.compile(safe_pattern(rf"(.*\.)?({pattern})$", origin))


def _as_type(tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.dtype == dtype else Tensor.of(DerivedBlob(Rounded(), tensor, dtype))


def merged_blob(
    weight: Blob, a: Blob, b: Blob, scale: float, transposed: bool = False, magnitude: Blob | None = None
) -> "MergedBlob":
    """The blob of a weight with a low-rank update.

    weight: (out, in...), or (in, out) if `transposed`; a: (rank, in...); b: (out, rank, 1...); magnitude: DoRA's, with
    as many elements as there are outputs.
    """
    plain = MergedBlob(weight, a, b, scale, transposed)
    if magnitude is None:
        return plain
    return replace(plain, factors=_OutputFactors.of(plain, magnitude), outputs=(0, b.shape[0]))


@dataclass(frozen=True)
class MergedBlob(Blob):
    """`weight + scale * (B @ A)`, times a factor for each output if there are `factors`; see `merge_lora`.

    weight: (out, in...), or (in, out) if `transposed`; a: (rank, in...); b: (out, rank, 1...).
    """

    weight: Blob
    a: Blob
    b: Blob
    scale: float
    transposed: bool = False
    factors: "_OutputFactors | None" = None
    outputs: tuple[int, int] = (0, 0)
    """The range of outputs that the block has, among those of `factors`."""

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    @property
    def dtype(self) -> DType:
        return self.weight.dtype

    @property
    def computed_dtype(self) -> DType:
        return _FLOAT64 if self.dtype == _FLOAT64 else _FLOAT32

    def parts(self) -> tuple[Blob, ...]:
        factors = () if self.factors is None else (self.factors.magnitude,)
        return (self.weight, self.a, self.b, *factors)

    def crop(self, box: Box) -> "MergedBlob":
        axis, inner = (1, slice(0, 1)) if self.transposed else (0, slice(1, None))
        low, high = box.start[axis], box.stop[axis]
        a = self.a.crop(Box((0, *box.start[inner]), (self.a.shape[0], *box.stop[inner])))
        b = self.b.crop(Box((low, *(0 for _ in self.b.shape[1:])), (high, *self.b.shape[1:])))
        start = self.outputs[0]
        return replace(self, weight=self.weight.crop(box), a=a, b=b, outputs=(start + low, start + high))

    def read_into(self, out: Array, reader: Reader) -> None:
        factors = None if self.factors is None else self.factors.read(*self.outputs, reader)
        for box, values in self.sums(reader):
            if factors is not None:
                with np.errstate(all="ignore"):
                    if self.transposed:
                        values *= factors[box.start[1] : box.stop[1]]
                    else:
                        values *= factors[box.start[0] : box.stop[0], None]
            rounded = np.empty(values.shape, self.dtype)
            Rounded().decode_into(b"", rounded, values)
            out[box.index] = rounded.reshape(box.shape)

    def sums(self, reader: Reader) -> Iterator[tuple[Box, Array]]:
        """Blocks of the weight plus its update, as matrices (rows, columns...) of the computed type, in C order."""
        dtype, rank = self.computed_dtype, self.a.shape[0]
        with np.errstate(all="ignore"):
            a, b = (read(blob, reader).astype(dtype).astype(np.float64) for blob in (self.a, self.b))
        b = b.reshape(-1, rank)
        for box in slabs(self.shape, _BLOCK):
            rows = slice(box.start[0], box.stop[0])
            if self.transposed:
                left, right = a[:, rows].T, b[box.start[1] : box.stop[1]].T
            else:
                inner = Box((0, *box.start[1:]), (rank, *box.stop[1:]))
                left, right = b[rows], a[inner.index].reshape(rank, -1)
            with np.errstate(all="ignore"):
                values = matmul_in_order(left, right, dtype)
                values *= dtype.type(self.scale)
                values += read(self.weight.crop(box), reader).astype(dtype).reshape(values.shape)
            yield box, values


def matmul_in_order(left: Array, right: Array, dtype: DType) -> Array:
    """The product of two matrices, summed in ascending order of the inner axis and rounded to `dtype` after each sum.

    With `dtype` float32 and factors that are float32 numbers, products are exact, and a step is a fused multiply-add,
    but for a rounding in float64 in between, which changes the result in about one of 2**29 cases. Unlike a BLAS,
    this gives an element the same value whatever the shapes of the matrices.

    left: (n, rank) float64; right: (rank, m) float64. Returns (n, m) of `dtype`.
    """
    out = np.empty((left.shape[0], right.shape[1]), dtype)
    if not out.size:
        return out
    width = min(out.shape[1], _TILE)
    height = max(1, _TILE // width)
    with temporary_buffer(3 * 8 * height * width) as memory:
        buffers = memory[: 3 * 8 * height * width].view(np.float64).reshape(3, -1)
        for top in range(0, out.shape[0], height):
            for at in range(0, out.shape[1], width):
                tile = out[top : top + height, at : at + width]
                total, product = (buffer[: tile.size].reshape(tile.shape) for buffer in buffers[:2])
                rounded = buffers[2].view(dtype)[: tile.size].reshape(tile.shape)
                rounded[...] = 0
                for k in range(left.shape[1]):
                    np.multiply(left[top : top + height, k, None], right[k, at : at + width], out=product)
                    total[...] = rounded
                    total += product
                    np.copyto(rounded, total, casting="same_kind")
                tile[...] = rounded
    return out


@dataclass(frozen=True, eq=False)
class _OutputFactors:
    """DoRA's factor of each output: its magnitude divided by the norm of the merged weights that lead to it.

    Factors are computed when they are first needed, and remembered: one number for each output. Blocks of one tensor
    share them. Threads may compute the same factors twice, with equal results.
    """

    merged: MergedBlob
    magnitude: Blob
    values: Array
    """Of each output: (outputs,) of the computed type."""
    known: Array
    """Which of the values are computed: (outputs,) bool."""

    @classmethod
    def of(cls, merged: MergedBlob, magnitude: Blob) -> "_OutputFactors":
        count = merged.b.shape[0]
        return cls(merged, magnitude, np.zeros(count, merged.computed_dtype), np.zeros(count, np.bool_))

    def read(self, start: int, stop: int, reader: Reader) -> Array:
        """The factors of a range of outputs: (outputs,) of the computed type."""
        missing = start + np.flatnonzero(~self.known[start:stop])
        if missing.size:
            # How a column is summed depends on how the matrix is cut into blocks, so all columns are done at once.
            low, high = (0, self.known.size) if self.merged.transposed else (int(missing[0]), int(missing[-1]) + 1)
            self.values[low:high] = self._compute(low, high, reader)
            self.known[low:high] = True
        return self.values[start:stop]

    def _compute(self, low: int, high: int, reader: Reader) -> Array:
        whole = Box.whole(self.merged.shape)
        rows = whole if self.merged.transposed else Box((low, *whole.start[1:]), (high, *whole.stop[1:]))
        squares = np.zeros(high - low)
        with np.errstate(all="ignore"):
            for box, values in self.merged.crop(rows).sums(reader):
                wide = values.astype(np.float64)
                wide *= wide
                if self.merged.transposed:
                    squares[box.start[1] : box.stop[1]] += wide.sum(axis=0)
                else:
                    squares[box.start[0] : box.stop[0]] += wide.sum(axis=1)
            dtype = self.merged.computed_dtype
            magnitude = read(self.magnitude, reader).reshape(-1)[low:high].astype(dtype)
            result: Array = magnitude / np.sqrt(squares).astype(dtype)
        return result
