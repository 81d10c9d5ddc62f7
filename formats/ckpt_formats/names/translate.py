"""Translate checkpoints from one library's names to another's: weights and all their optimizer states.

The results are views: no data is read. A tensor that the table does not name is an error, and so is a missing tensor.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.formula import evaluate
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.names import legacy
from ckpt_formats.names.architecture import Architecture
from ckpt_formats.names.config import CONFIG
from ckpt_formats.names.describe import ModelDescription, by_config_alone, config_of, describe_model, weights_dtype
from ckpt_formats.names.family import COMPUTED, pattern_of
from ckpt_formats.names.from_arguments import ARGUMENTS
from ckpt_formats.names.renames import TensorRename, apply_renames
from ckpt_formats.names.table import NameRow
from ckpt_formats.names.tables import table_for, tables
from ckpt_formats.names.to_arguments import to_arguments, updated
from ckpt_formats.names.transforms import TRANSFORMS, ModelSizes

Naming = Literal["hf", "megatron", "megatron-legacy"]

_HEAD = "output_layer.weight"
_MAX_NAMES = 3


_SHAPES = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", ("vocabulary", "hidden")),
    (r"embedding\.position_embeddings\.weight", ("positions", "hidden")),
    (r".*\.linear_qkv\.weight", ("heads * head_dim + 2 * groups * head_dim", "hidden")),
    (r".*\.linear_qkv\.bias", ("heads * head_dim + 2 * groups * head_dim",)),
    (r".*\.linear_proj\.weight", ("hidden", "heads * head_dim")),
    (r".*\.linear_fc1\.weight", ("gates * ffn", "hidden")),
    (r".*\.linear_fc1\.bias", ("gates * ffn",)),
    (r".*\.linear_fc2\.weight", ("hidden", "ffn")),
    (r".*\.mlp\.router\.weight", ("experts", "hidden")),
    (r".*\.[qk]_layernorm\.weight", ("head_dim",)),
    (r".*\.linear_(?:proj|fc2)\.bias|.*layernorm\.(?:weight|bias)", ("hidden",)),
)
_PADDED = re.compile(_SHAPES[0][0])


def naming_of(checkpoint: Checkpoint) -> Naming | None:
    """The library whose names a checkpoint's tensors have; None if it is not known."""
    own = [name for name, parameter in checkpoint.parameters.items() if parameter.role != "extra"]
    if any(map(legacy.is_legacy, own)):
        return "megatron-legacy"
    known = {name for table in tables() for row in table.rows for name in (row.name, *row.other_names)}
    if known.difference([_HEAD]).intersection(map(pattern_of, own)):
        return "megatron"
    config = config_of(checkpoint)
    if config is None or (table := table_for(config)) is None:
        return None
    return "hf" if checkpoint.parameters.keys() & set(table.expected_names(config) or ()) else None


def to_hf(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None, *, partial: bool = False) -> Checkpoint:
    """A checkpoint with Megatron's names under the names of transformers. Its configuration is the extra `CONFIG`.

    `config` is the model's configuration; by default it is the checkpoint's own, or created from the run's arguments.
    `partial` allows missing tensors.

    Raises: UnsupportedError for a model of no known family, CorruptError if tensors, arguments and configuration
    contradict each other, IncompleteError if something is missing.
    """
    source = _without(to_core(checkpoint), COMPUTED)
    description = describe_model(source, config_of(source) if config is None else config, partial)
    model, present = description.model, {*source.parameters, *source.aliases}
    lines = _lines(description, source)
    _check_known(source, {name for line in lines for name in line.names}, description.table.family)
    if not partial:
        _check_there(source, [line.names[0] for line in lines if not present.intersection(line.names)])
    changes, padding = [], 0
    for line in lines:
        for name in source.parameters.keys() & set(line.names):
            shape = source.parameters[name].weight.shape
            check_shape(line.names[0], shape, model, padded=True, source_name=name)
            padding = max(padding, shape[0] - model.vocabulary) if line.transform == "vocabulary" else padding
            changes.append(TensorRename((name,), line.hf, _split(line, _sizes(model))))
    text = f"the last {padding} rows of the vocabulary's tables are padding and are left out"
    padded = (Notice(text),) if padding else ()
    return replace(
        apply_renames(source, changes, description.table.expected_names(description.config) or ()),
        aliases=_aliases(source, {name: line.hf[0] for line in lines for name in line.names}),
        extras={**source.extras, CONFIG: dict(description.config)},
        notices=(*source.notices, *description.notices, *padded),
    )


def to_megatron(
    checkpoint: Checkpoint, config: Mapping[str, Any] | None = None, *, partial: bool = False
) -> Checkpoint:
    """A checkpoint with transformers' names under the names of Megatron core. Its arguments are the extra `ARGUMENTS`.

    Tables of the vocabulary have no padding: it is added when they are split over ranks. Raises the errors of `to_hf`.
    """
    description = by_config_alone(checkpoint, config)
    source = _without(checkpoint, description.table.ignored)
    model, present_names = description.model, {*source.parameters, *source.aliases}
    lines = _lines(description, source)
    _check_known(source, {name for line in lines for name in line.hf}, description.table.family)
    required = (line.hf for line in lines if not partial or present_names.intersection(line.hf))
    _check_there(source, [name for names in required for name in names if name not in present_names])
    patterns = {pattern_of(line.names[0]) for line in lines}
    arguments = to_arguments(model, description.table, patterns, weights_dtype(source))
    present = [line for line in lines if source.parameters.keys() >= set(line.hf)]
    renamed = apply_renames(
        source, [TensorRename(line.hf, line.names[:1], _join(line, _sizes(model))) for line in present]
    )
    for line in present:
        name = line.names[0]
        check_shape(name, renamed.parameters[name].weight.shape, model, padded=False, source_name=", ".join(line.hf))
    step = {} if source.origin.step is None else {"iteration": source.origin.step}
    extras = {legacy.VERSION: legacy.CURRENT, **step, **source.extras}
    return replace(
        renamed,
        aliases=_aliases(source, {name: line.names[0] for line in lines for name in line.hf}),
        extras={
            **extras,
            ARGUMENTS: updated(source.extras.get(ARGUMENTS), arguments),
            CONFIG: dict(description.config),
        },
    )


def to_core(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with any of Megatron's names under those of Megatron core."""
    return legacy.to_core(checkpoint) if naming_of(checkpoint) == "megatron-legacy" else checkpoint


def to_legacy(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with any of Megatron's names under those from before Megatron core."""
    return checkpoint if naming_of(checkpoint) == "megatron-legacy" else legacy.to_legacy(checkpoint)


def _lines(description: ModelDescription, source: Checkpoint) -> tuple[NameRow, ...]:
    """The model's rows. That of the second name of a tied tensor is included only if the source has the alias."""
    lines, tie = description.table.lines(description.config), description.table.tie(description.config)
    if lines is None:
        raise IncompleteError("config.json does not state the number of layers", where=source.path)
    if tie is not None and (own := {tie.alias, _HEAD} & source.parameters.keys()):
        raise UnsupportedError(
            f"`{own.pop()}` is a separate tensor, but the model's configuration ties it to the embeddings",
            where=source.path,
        )
    return tuple(
        line
        for line in lines
        if tie is None or tie.alias not in line.hf or source.aliases.keys() & {*line.names, *line.hf}
    )


def _check_known(source: Checkpoint, known: set[str], family: str) -> None:
    surplus = [name for name, parameter in source.parameters.items() if parameter.role != "extra" and name not in known]
    if surplus:
        raise UnsupportedError(
            f"a model of the family {family} has no {_listed(surplus)}",
            where=source.path,
            hint="Leave them out with --skip, or name the right config.json with --config.",
        )


def _check_there(source: Checkpoint, missing: Sequence[str]) -> None:
    if missing:
        raise IncompleteError(
            f"tensors of the model are missing: {_listed(missing)}",
            where=source.path,
            hint="Is the configuration the model's own? Are files missing?",
        )


def _listed(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"`{printable(name)}`" for name in names[:_MAX_NAMES]) + suffix


def _aliases(source: Checkpoint, new: Mapping[str, str]) -> dict[str, str]:
    """The aliases under the new names. Raises `UnsupportedError` for a name that the model does not have."""
    if strange := [name for pair in source.aliases.items() for name in pair if name not in new]:
        raise UnsupportedError(f"`{printable(strange[0])}` is tied, but is not a name of the model", where=source.path)
    return {new[alias]: new[name] for alias, name in source.aliases.items()}


def _without(source: Checkpoint, computed: re.Pattern[str]) -> Checkpoint:
    """The checkpoint without tensors that models compute instead of loading them."""
    retained = {name: parameter for name, parameter in source.parameters.items() if not computed.fullmatch(name)}
    return source if len(retained) == len(source.parameters) else replace(source, parameters=retained)


def _sizes(model: Architecture) -> ModelSizes:
    return ModelSizes(model.heads, model.groups, model.vocabulary)


def _split(line: NameRow, sizes: ModelSizes) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    return lambda tensors: TRANSFORMS[line.transform].split(tensors[0], sizes)


def _join(line: NameRow, sizes: ModelSizes) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    return lambda tensors: (TRANSFORMS[line.transform].join(tensors, sizes),)


def check_shape(name: str, shape: Shape, model: Architecture, *, padded: bool, source_name: str) -> None:
    """Raise `CorruptError` if a tensor does not have the shape of the model's architecture.

    `name` is its name in Megatron's plain layers, `source_name` the name for messages. `padded` allows more rows in
    tables of the vocabulary.
    """
    sizes = {
        "vocabulary": model.vocabulary,
        "hidden": model.hidden,
        "positions": model.positions,
        "heads": model.heads,
        "groups": model.groups,
        "head_dim": model.head_dim,
        "ffn": model.ffn,
        "gates": 2 if model.activation == "silu" else 1,
        "experts": model.experts or 0,
    }
    formulas = next(formulas for pattern, formulas in _SHAPES if re.fullmatch(pattern, name))
    expected = tuple(evaluate(formula, sizes, f"the shape of `{name}`") for formula in formulas)
    longer = padded and _PADDED.fullmatch(name) and shape[1:] == expected[1:] and shape[:1] > expected[:1]
    if shape != expected and not longer:
        raise CorruptError(
            f"`{printable(source_name)}` has the shape {list(shape)}, but the model's sizes give {list(expected)}",
            hint="The configuration or the arguments contradict the tensors: name the right config.json with --config.",
        )
