"""Describe the model in a checkpoint with Megatron core's names: by its configuration, or by its run's arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record
from ckpt_formats.names.architecture import Architecture
from ckpt_formats.names.config import CONFIG, of_config, to_config
from ckpt_formats.names.family import KNOWN, Family, families_of, pattern_of
from ckpt_formats.names.from_arguments import ARGUMENTS, of_arguments, true_vocabulary
from ckpt_formats.names.table import Table
from ckpt_formats.names.tables import table_for

_WORD_TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ModelDescription:
    """A model, its family, its configuration, and notices about how they were determined."""

    model: Architecture
    table: Table
    config: Mapping[str, Any]
    notices: tuple[Notice, ...] = ()


def describe_model(source: Checkpoint, config: Mapping[str, Any] | None, partial: bool) -> ModelDescription:
    """The model of a checkpoint with Megatron core's names. A configuration takes precedence over the arguments.

    `partial` allows missing tensors. Raises the errors of `to_hf`.
    """
    args = source.extras.get(ARGUMENTS)
    record = args if isinstance(args, Record) else None
    if config is None and record is None:
        raise IncompleteError(
            "the model is not known: there are neither arguments of a Megatron run (`args`) nor a config.json",
            where=source.path,
            hint="Name the model's config.json with --config.",
        )
    if config is not None:
        return _by_config(config, record, source.path)
    assert record is not None
    return _by_arguments(source, record, partial)


def by_config_alone(source: Checkpoint, config: Mapping[str, Any] | None) -> ModelDescription:
    """The model that a configuration describes: `config`, else the one in the checkpoint.

    Raises `IncompleteError` if there is none.
    """
    known_config = config_of(source) if config is None else config
    if known_config is None:
        raise IncompleteError(
            "there is no config.json, so the model is not known",
            where=source.path,
            hint="Name the model's config.json, or the folder that contains it, with --config.",
        )
    return _by_config(known_config, None, source.path)


def config_of(source: Checkpoint) -> Mapping[str, Any] | None:
    """The configuration in a checkpoint's extras, or None."""
    config = source.extras.get(CONFIG)
    return config if isinstance(config, dict) else None


def weights_dtype(source: Checkpoint) -> str | None:
    """The dtype of the first floating-point weight; most weights have it, some may be more precise."""
    weights = (p.weight for p in source.parameters.values() if p.role != "extra" and is_float(p.weight.dtype))
    return next((weight.dtype.name for weight in weights), None)


def _by_config(config: Mapping[str, Any], record: Record | None, where: Path) -> ModelDescription:
    table = table_for(config)
    if table is None:
        kind = printable(str(config.get("model_type")))[:60]
        raise UnsupportedError(f"the Megatron names of models of type {kind} are not known", where=where, hint=KNOWN)
    model = of_config(config, table, where)
    if record is None:
        return ModelDescription(model, table, config)
    names = {pattern_of(line.names[0]) for line in table.lines(config) or ()}
    other = of_arguments(record, table, names, model.vocabulary, model, where)
    differing = tuple(model.differences(other))
    notice = Notice("config.json and the run's arguments differ", differing, Weight.UNSURE)
    return ModelDescription(model, table, config, (notice,) if differing else ())


def _by_arguments(source: Checkpoint, record: Record, partial: bool) -> ModelDescription:
    names = [name for name, parameter in source.parameters.items() if parameter.role != "extra"]
    families = families_of(names, source.aliases, partial=partial)
    rows = _rows(source, record)
    known = true_vocabulary(record, rows)
    family, model = _chosen(families, record, rows if known is None else known, source.path)
    config = to_config(model, family.table, family.flags, weights_dtype(source))
    notices = [Notice(f"config.json is created from the run's arguments: a {family.table.family} model")]
    if known is None:
        text = (
            f"the true size of the vocabulary is not known: all {rows} rows are kept, including padding. State it with "
            "a rule (vocabulary = N), or with --config"
        )
        notices.append(Notice(text, weight=Weight.UNSURE))
    return ModelDescription(model, family.table, config, tuple(notices))


def _rows(source: Checkpoint, record: Record) -> int:
    table = source.parameters.get(_WORD_TABLE)
    rows = table.weight.shape[0] if table is not None and table.weight.shape else record.get("padded_vocab_size")
    if not isinstance(rows, int) or rows < 1:
        raise IncompleteError(f"`{_WORD_TABLE}` is missing", where=source.path)
    return rows


def _chosen(families: Sequence[Family], record: Record, vocabulary: int, where: Path) -> tuple[Family, Architecture]:
    """The one of several families that the arguments describe, and its model.

    A Mistral has the tensors of a Llama, but a sliding window. Raises `UnsupportedError` if no or several families
    match.
    """
    attempts = [(family, _try_arguments(family, record, vocabulary, where)) for family in families]
    matches = [(family, model) for family, model in attempts if isinstance(model, Architecture)]
    if not matches:
        raise next(error for _, error in attempts if isinstance(error, UnsupportedError))
    windowed = [match for match in matches if "window" in match[0].table.config]
    plain = [match for match in matches if match not in windowed]
    fitting = windowed if matches[0][1].window is not None else plain or windowed
    if len(fitting) == 1:
        return fitting[0]
    family_names = ", ".join(family.table.family for family, _ in matches)
    kinds = "those of several families" if fitting else "with a sliding window, those of"
    raise UnsupportedError(
        f"the tensors are {kinds}: {family_names}", hint="Name the model's config.json with --config."
    )


def _try_arguments(family: Family, record: Record, vocabulary: int, where: Path) -> Architecture | UnsupportedError:
    """The model that the arguments describe, or the error if it cannot be of this family."""
    try:
        return of_arguments(record, family.table, family.names, vocabulary, None, where)
    except UnsupportedError as error:
        return error
