"""The average of several checkpoints."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.combine.average_blob import AverageBlob, EqualBlob
from ckpt.combine.sources import all_files, dropped_notices, holder, model_of, place_of, untied_config
from ckpt_formats.core.arguments import Decay, Positive, checked
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Edit, Parameter
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.joined_seals import JoinedSeals
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.weights import check_not_quantised
from ckpt_formats.core.tensor import ComputedBlob, Tensor
from ckpt_formats.core.text import list_names, printable

_ONE_MODEL = "Only checkpoints of one model can be averaged: their tensors must have the same names and shapes."


@checked
def ema_weights(count: Positive, decay: Decay) -> list[float]:
    """The weights that `average` needs for the exponential moving average of `count` states, the oldest first.

    The average starts at the first state; each later state changes it to `decay * average + (1 - decay) * state`.

    >>> ema_weights(3, 0.5)
    [0.25, 0.25, 0.5]
    """
    return [decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count))]


@dataclass(frozen=True)
class Average(Edit):
    """The mean of several checkpoints: where each is, and how it came to be."""

    sources: tuple[tuple[Path, tuple[Edit, ...]], ...]
    weights: tuple[float, ...]

    def inputs(self) -> tuple[Path, ...]:
        return tuple(path for path, _ in self.sources)


def average(sources: Sequence[Checkpoint], weights: Sequence[float] | None = None) -> Checkpoint:
    """The weighted mean of the models' tensors, without optimizer. All models must have the same names and shapes.

    An element is `(w0 * x0 + w1 * x1 + ...) / sum(w)`, computed in float64 from left to right, and rounded once (to
    nearest, ties to even) to the element type of the first source. NaN and infinity follow IEEE 754; a NaN is the
    positive quiet NaN. Of float64 tensors each operation rounds, so even equal values may change in the last bit.
    Integers and booleans must be equal in all sources, which is checked when they are read, but for
    `num_batches_tracked` of batch normalization: of these counters the largest is taken.

    `weights`: one finite number for each source, with a sum above zero; None: all are 1. They need not sum to 1.
    Names that are tied in all sources stay tied. Memory: a few blocks of 64 Ki elements, for any number of sources.

    Raises `IncompleteError` if a source lacks tensors, `UnsupportedError` if shapes or kinds of elements differ,
    `InvalidArgumentError` without sources and for weights that are not finite or not as many.
    """
    if not sources:
        raise InvalidArgumentError("an average needs at least one checkpoint")
    numbers = _checked_weights(sources, weights)
    for source in sources:
        check_not_quantised(source, "averaged")
    models = [model_of(source) for source in sources]
    names = _shared_names(models)
    parameters: dict[str, Parameter] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[str, ...], str] = {}
    for name in names:
        holders = tuple(holder(model, name) for model in models)
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
        extras=untied_config(models[0].extras) if untied else models[0].extras,
        files=all_files(models),
        seals=JoinedSeals([model.seals for model in models]),
        notices=tuple(dict.fromkeys([*(n for m in models for n in m.notices), *_average_notices(sources, parameters)])),
        digests={},
        errors={},
        identities={path: identity for model in models for path, identity in model.identities.items()},
    )


def _checked_weights(sources: Sequence[Checkpoint], weights: Sequence[float] | None) -> tuple[float, ...]:
    numbers = (1.0,) * len(sources) if weights is None else tuple(map(float, weights))
    if len(numbers) != len(sources):
        raise InvalidArgumentError(f"{len(sources)} checkpoints need as many weights, not {len(numbers)}")
    if not all(map(math.isfinite, numbers)) or math.fsum(numbers) <= 0:
        raise InvalidArgumentError("the weights of an average must be finite, and their sum must be above zero")
    return numbers


def _shared_names(models: Sequence[Checkpoint]) -> list[str]:
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
                    f"it lacks {len(absent)} tensors of {place_of(owner)}: {list_names(absent, printable)}",
                    where=place_of(other),
                    hint=_ONE_MODEL,
                )
    return list(all_names[0])


def _check_shapes(models: Sequence[Checkpoint], parameters: Mapping[str, Parameter]) -> None:
    first = place_of(models[0])
    for model in models[1:]:
        pairs = [(n, p.weight, model.parameters[holder(model, n)].weight) for n, p in parameters.items()]
        different = [
            f"{printable(name)} {list(b.shape)} instead of {list(a.shape)}"
            for name, a, b in pairs
            if a.shape != b.shape
        ]
        if different:
            raise UnsupportedError(
                f"{len(different)} tensors have other shapes than those of {first}: {list_names(different, printable)}",
                where=place_of(model),
                hint=_ONE_MODEL,
            )
        mixed = [name for name, a, b in pairs if not _can_average(a.dtype) and a.dtype != b.dtype]
        mixed += [name for name, a, b in pairs if _can_average(a.dtype) and not _can_average(b.dtype)]
        if mixed:
            raise UnsupportedError(
                f"{len(mixed)} tensors have other element types than those of {first}: {list_names(mixed, printable)}",
                where=place_of(model),
            )


def _can_average(dtype: DType) -> bool:
    """Is it a type of real or complex numbers, not of counts, flags or exponents of scales?"""
    return (is_float(dtype) and dtype.name != "float8_e8m0fnu") or dtype.kind == "c"


def _average_tensor(name: str, members: Sequence[Parameter], weights: tuple[float, ...]) -> Tensor:
    tensors = tuple(member.weight for member in members)
    if _can_average(tensors[0].dtype):
        return Tensor.of(ComputedBlob(AverageBlob(tensors, weights, tensors[0].dtype), name))
    return Tensor.of(EqualBlob(tensors, name, name.rpartition(".")[2] == "num_batches_tracked"))


def _average_notices(sources: Sequence[Checkpoint], parameters: Mapping[str, Parameter]) -> Iterator[Notice]:
    yield from dropped_notices(sources)
    small = [name for name, p in parameters.items() if p.weight.dtype.itemsize == 1 and _can_average(p.weight.dtype)]
    if small:
        text = "8-bit floats are averaged as they are stored: this is wrong if other tensors hold scales for them"
        yield Notice(text, tuple(small), Weight.UNSURE)
    counters = [
        name
        for name, p in parameters.items()
        for f in p.weight.examples()
        if isinstance(f.blob, EqualBlob) and f.blob.largest
    ]
    if counters:
        yield Notice("counters of batches are not averaged: the largest is taken", tuple(counters))
