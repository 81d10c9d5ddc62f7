"""Several checkpoints of one model as one: each tensor is made of the tensors of its name, and the files go along."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt.combine.average_blob import EqualBlob
from ckpt.combine.sources import all_files, dropped_notices, holder, model_of, untied_config
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Edit, Parameter, opened_path
from ckpt_formats.core.computed_blobs import ComputedBlob
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.identity import joined
from ckpt_formats.core.joined_seals import JoinedSeals
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.weights import check_not_quantised
from ckpt_formats.core.tensor import Blob, Tensor, checked_read
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import TensorName, Value

Combine = Callable[[str, Sequence[Tensor]], Blob]
"""Makes the blob of a tensor out of the tensors of its name, all of one shape, in the order of the checkpoints."""

_CONFIG = "hf/config.json"
_OF_THE_WRITER = ("transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")
"""Entries of a configuration that change nothing in what a model computes."""


def combined(sources: Sequence[Checkpoint], edit: Edit, combine: Combine, done: str) -> Checkpoint:
    """The model whose tensors `combine` makes of those of the sources, with the files of the first; no optimizer.

    Integers and booleans are not combined: they must be equal in all sources, but for counters of batches. Names that
    are tied in all sources stay tied. `done` is the word for errors and notices, such as "averaged".

    Raises `IncompleteError` if a source lacks tensors, `UnsupportedError` if shapes or kinds of elements differ, or
    weights are quantised.
    """
    for source in sources:
        check_not_quantised(source, done)
    models = [model_of(source) for source in sources]
    parameters: dict[str, Parameter] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[str, ...], str] = {}
    names = _shared_names(models, done)
    _check_shapes(models, names, done)
    for name in names:
        holders = tuple(holder(model, name) for model in models)
        if holders in first_name:
            aliases[name] = first_name[holders]
            continue
        first_name[holders] = name
        members = [model.parameters[holder] for model, holder in zip(models, holders, strict=True)]
        tensor = _combined_tensor(name, [member.weight for member in members], combine)
        parameters[name] = replace(members[0], name=name, states={MODEL: tensor})
    untied = [name for name in models[0].aliases if name in parameters]
    steps = {source.origin.step for source in sources}
    notices = [*(n for m in models for n in m.notices), *_notices(sources, models, parameters, done)]
    return edited(
        models[0],
        edit,
        origin=replace(models[0].origin, step=steps.pop() if len(steps) == 1 else None),
        parameters=parameters,
        aliases=aliases,
        extras=untied_config(models[0].extras) if untied else models[0].extras,
        files=all_files(models),
        seals=JoinedSeals([model.seals for model in models]),
        notices=tuple(dict.fromkeys(notices)),
        digests={},
        errors={},
        identities=joined(*(model.identities for model in models)),
    )


def is_number(dtype: DType) -> bool:
    """Is it a type of real or complex numbers, not of counts, flags or exponents of scales?"""
    return (is_float(dtype) and dtype.name != "float8_e8m0fnu") or dtype.kind == "c"


def _combined_tensor(name: str, tensors: Sequence[Tensor], combine: Combine) -> Tensor:
    if is_number(tensors[0].dtype):
        return Tensor.of(ComputedBlob(combine(name, tensors), name))
    return Tensor.of(EqualBlob(tuple(tensors), name, name.rpartition(".")[2] == "num_batches_tracked"))


def weight_of(model: Checkpoint, name: str) -> Tensor:
    """The weight of a name, which may be tied to another."""
    return model.parameters[holder(model, name)].weight


def _hint(done: str) -> str:
    return f"Only checkpoints of one model can be {done}: their tensors must have the same names and shapes."


def _shared_names(models: Sequence[Checkpoint], done: str) -> list[str]:
    """All names of the models' tensors, tied ones last. Raises `IncompleteError` if not all models have them."""
    all_names = [
        dict.fromkeys([*m.parameters, *(a for a, n in m.aliases.items() if n in m.parameters)]) for m in models
    ]
    for model, names in zip(models[1:], all_names[1:], strict=True):
        for owner, other, absent in (
            (models[0], model, [name for name in all_names[0] if name not in names]),
            (model, models[0], [name for name in names if name not in all_names[0]]),
        ):
            if absent:
                raise IncompleteError(
                    f"it lacks {len(absent)} tensors of {opened_path(owner)}: {list_names(absent, printable)}",
                    where=opened_path(other),
                    hint=_hint(done),
                )
    return list(all_names[0])


def _check_shapes(models: Sequence[Checkpoint], names: Sequence[str], done: str) -> None:
    first = opened_path(models[0])
    for model in models[1:]:
        pairs = [(name, weight_of(models[0], name), weight_of(model, name)) for name in names]
        different = [
            f"{printable(name)} {list(b.shape)} instead of {list(a.shape)}"
            for name, a, b in pairs
            if a.shape != b.shape
        ]
        if different:
            raise UnsupportedError(
                f"{len(different)} tensors have other shapes than those of {first}: {list_names(different, printable)}",
                where=opened_path(model),
                hint=_hint(done),
            )
        mixed = [name for name, a, b in pairs if not is_number(a.dtype) and a.dtype != b.dtype]
        mixed += [name for name, a, b in pairs if is_number(a.dtype) and not is_number(b.dtype)]
        if mixed:
            raise UnsupportedError(
                f"{len(mixed)} tensors have other element types than those of {first}: {list_names(mixed, printable)}",
                where=opened_path(model),
            )


def _notices(
    sources: Sequence[Checkpoint], models: Sequence[Checkpoint], parameters: Mapping[str, Parameter], done: str
) -> Iterator[Notice]:
    yield from dropped_notices(sources)
    small = [name for name, p in parameters.items() if p.weight.dtype.itemsize == 1 and is_number(p.weight.dtype)]
    if small:
        text = f"8-bit floats are {done} as they are stored: this is wrong if other tensors hold scales for them"
        yield Notice(text, tuple(small), Weight.UNSURE)
    counters = [
        name
        for name, p in parameters.items()
        for f in p.weight.examples()
        if isinstance(f.blob, EqualBlob) and f.blob.largest
    ]
    if counters:
        yield Notice(f"counters of batches are not {done}: the largest is taken", tuple(counters))
    for model in models[1:]:
        where = f"those of {opened_path(model)}"
        entries = _other_entries(models[0].extras.get(_CONFIG), model.extras.get(_CONFIG))
        if entries:
            text = f"entries of config.json differ from {where}; the first checkpoint's are kept"
            yield Notice(text, entries, Weight.UNSURE)
        files = _other_tokenizer_files(models[0], model)
        if files:
            text = f"files of the tokenizer differ from {where}; the first checkpoint's are kept"
            yield Notice(text, files, Weight.UNSURE)


def _other_entries(one: Value, other: Value) -> tuple[str, ...]:
    """The entries of a configuration that differ in what the model computes."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ()
    names = [name for name in {**one, **other} if isinstance(name, str)]
    relevant = [name for name in names if not name.startswith("_") and name not in _OF_THE_WRITER]
    return tuple(name for name in relevant if one.get(name) != other.get(name))


def _other_tokenizer_files(one: Checkpoint, other: Checkpoint) -> tuple[str, ...]:
    """The names of files of the tokenizer that both have and that differ."""
    keys = [key for key in one.extras if key in other.extras and ("token" in key or "vocab" in key or "merges" in key)]
    return tuple(key.removeprefix("hf/") for key in keys if _differ(one, other, key))


def _differ(one: Checkpoint, other: Checkpoint, key: str) -> bool:
    a, b = one.extras[key], other.extras[key]
    if not isinstance(a, TensorName) or not isinstance(b, TensorName):
        return bool(a != b)
    first, second = one.parameters[a.name].weight, other.parameters[b.name].weight
    if first.shape != second.shape:
        return True
    return checked_read(first, one.identities).tobytes() != checked_read(second, other.identities).tobytes()
