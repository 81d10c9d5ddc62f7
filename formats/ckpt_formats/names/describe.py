"""Describe the model in a checkpoint with Megatron core's names: by its configuration, or by its run's arguments."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Record
from ckpt_formats.names.arguments import ARGUMENTS, arguments_for, compared, true_vocabulary, values_of
from ckpt_formats.names.config import (
    CONFIG,
    checked_values,
    differing,
    is_preferred,
    model_of,
    read_config,
    to_config,
)
from ckpt_formats.names.expressions import names_of
from ckpt_formats.names.hyperparameters import Values, noted
from ckpt_formats.names.model import Model
from ckpt_formats.names.tables import Family, blocks, dialect, families, family_of

COMPUTED = re.compile(r"(?:.*\.)?rotary_pos_emb\.inv_freq")
"""Tensors that old versions of Megatron save, although all versions compute them."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
WORD_TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ModelDescription:
    """A model, its family, its configuration, and notices about how they were determined."""

    model: Model
    family: Family
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
        return of_present(_by_config(config, record, source.path), "megatron", source)
    assert record is not None
    return _by_arguments(source, record, partial)


def by_config_alone(
    source: Checkpoint, config: Mapping[str, Any] | None, dialect_name: str | None = "hf"
) -> ModelDescription:
    """The model that a configuration describes: `config`, else the one in the checkpoint.

    It has the layers for multi-token prediction of which the source has tensors, by their names in a dialect; None: all
    that the configuration states.

    Raises `IncompleteError` if there is none.
    """
    known_config = config_of(source) if config is None else config
    if known_config is None:
        raise IncompleteError(
            "there is no config.json, so the model is not known",
            where=source.path,
            hint="Name the model's config.json, or the folder that contains it, with --config.",
        )
    description = _by_config(known_config, None, source.path)
    return description if dialect_name is None else of_present(description, dialect_name, source)


def config_of(source: Checkpoint) -> Mapping[str, Any] | None:
    """The configuration in a checkpoint's extras, or None."""
    config = source.extras.get(CONFIG)
    return config if isinstance(config, dict) else None


def weights_dtype(source: Checkpoint) -> str | None:
    """The dtype of the first floating-point weight; most weights have it, some may be more precise."""
    weights = (p.weight for p in source.parameters.values() if p.role != "extra" and is_float(p.weight.dtype))
    return next((weight.dtype.name for weight in weights), None)


def pattern_of(name: str) -> str:
    """The name with `{}` for each number.

    >>> pattern_of("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight")
    'decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight'
    """
    return _NUMBER.sub("{}", name)


def known_families() -> str:
    """The families, as text for hints."""
    return f"ckpt knows {', '.join(family.name for family in families())}: see `ckpt formats --families`."


def of_present(description: ModelDescription, dialect_name: str, source: Checkpoint) -> ModelDescription:
    """The model without layers for multi-token prediction, unless the source has tensors of them in this dialect."""
    names = {*source.parameters, *source.aliases}
    return replace(description, model=description.model.of_present(dialect_name, names))


def check_further_tokens(values: Values, source: Checkpoint, library: str) -> None:
    """Raise `UnsupportedError` for a model with layers for multi-token prediction."""
    if values["mtp_layers"]:
        first, count = values["layers"], values["mtp_layers"]
        layers = "|".join(str(first + number) for number in range(count))
        raise UnsupportedError(
            f"the model has {count} layer{'s' * (count > 1)} for multi-token prediction, which ckpt does not write "
            f"for {library}",
            where=source.path,
            hint=f"Leave them out with --skip 'layers\\.({layers})\\.'",
        )


def _by_config(config: Mapping[str, Any], record: Record | None, where: Path) -> ModelDescription:
    family = family_of(config)
    if family is None:
        kind = printable(str(config.get("model_type")))[:60]
        raise UnsupportedError(
            f"the names of models of type {kind} in other libraries are not known", where=where, hint=known_families()
        )
    values = checked_values(config, family, where)
    notices: tuple[Notice, ...] = ()
    if record is not None and (differing_values := compared(values, record, where)):
        notices = (Notice("config.json and the run's arguments differ", differing_values, Weight.UNSURE),)
    return ModelDescription(model_of(family, values), family, config, notices)


def _by_arguments(source: Checkpoint, record: Record, partial: bool) -> ModelDescription:
    names = [name for name, parameter in source.parameters.items() if parameter.role != "extra"]
    rows = _rows(source, record)
    known = true_vocabulary(record, rows)
    vocabulary = rows if known is None else known
    values = values_of(record, names, vocabulary, partial=partial, where=source.path)
    _check_names(Model(values), names, source, partial)
    family = _family_of(values, source.path)
    config = to_config(values, family, weights_dtype(source))
    notices = [Notice(f"config.json is created from the run's arguments: a {family.name} model")]
    notices += noted(values, read_config(config, family), "transformers")
    if known is None:
        text = (
            f"the true size of the vocabulary is not known: all {rows} rows are kept, including padding. State it with "
            "a rule (vocabulary = N), or with --config"
        )
        notices.append(Notice(text, weight=Weight.UNSURE))
    return ModelDescription(model_of(family, values), family, config, tuple(notices))


def _rows(source: Checkpoint, record: Record) -> int:
    table = source.parameters.get(WORD_TABLE)
    rows = table.weight.shape[0] if table is not None and table.weight.shape else record.get("padded_vocab_size")
    if not isinstance(rows, int) or rows < 1:
        raise IncompleteError(f"`{WORD_TABLE}` is missing", where=source.path)
    return rows


def _check_names(model: Model, names: Sequence[str], source: Checkpoint, partial: bool) -> None:
    """Raise `UnsupportedError` if the tensors are of other kinds than those of the model that the arguments describe.

    Kinds, because a kind of which only some layers are missing is an incomplete file.
    """
    present = {*map(pattern_of, (*names, *source.aliases))}
    stored, tie = model.stored("megatron"), model.tie("megatron")
    known = {pattern_of(name) for one in stored for name in one.names}
    missing = dict.fromkeys(
        pattern_of(one.names[0])
        for one in stored
        if not present & set(map(pattern_of, one.names)) and not (tie and one.names[0] == tie.alias)
    )
    problems = list(_listed("lacks", sorted(present - known)))
    if not partial:
        problems += _listed("also has", sorted(missing))
    if problems:
        raise UnsupportedError(
            f"the run's arguments describe a model that {' and '.join(problems)}",
            where=source.path,
            hint="Leave out tensors that the model does not need with --skip; other formats keep Megatron's names.",
        )


def _listed(verb: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        stated = ", ".join(sorted({entry for name in names for entry in _arguments_of(name)}))
        by = f" (see the arguments {stated})" if stated else ""
        yield f"{verb} {list_names(names)}{by}"


def _arguments_of(pattern: str) -> Iterator[str]:
    """The arguments on which the tensors of a name depend."""
    rules = [rule for rule in dialect("megatron").rules if any(_fits(name, pattern) for name in rule.names)]
    atoms = {atom for rule in rules for atom in rule.atoms}
    for block in blocks():
        if atoms & block.atoms.keys():
            yield from (arguments_for(name) for name in names_of(block.when) if name != "layer")


def _fits(name: str, pattern: str) -> bool:
    return pattern.endswith(pattern_of(re.sub(r"\{\w+\}", "0", name)))


def _family_of(values: Values, where: Path) -> Family:
    """The family that can state these hyperparameters. Raises `UnsupportedError` if there is none, or several."""
    misfits = {family.name: differing(values, family) for family in families()}
    other_kinds = {family.name for family in families() if not is_preferred(values, family)}
    fitting = [family for family in families() if not misfits[family.name] and family.name not in other_kinds]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UnsupportedError(
            f"the model may be of several families: {', '.join(family.name for family in fitting)}",
            where=where,
            hint="Name the model's config.json with --config.",
        )
    # A family that could state the model, but whose models have more, is not similar.
    # Nor does it help to name what no argument states.
    stated_by_arguments = dialect("megatron").settings.read
    name, nearest = min(
        ((family.name, misfits[family.name]) for family in families() if misfits[family.name]),
        key=lambda item: (item[0] in other_kinds, len(item[1]), len(set(item[1]) - stated_by_arguments.keys())),
    )
    stated = "; ".join(_stated(values, nearest))
    raise UnsupportedError(
        f"no known family of models in transformers has what the run's arguments state. The most similar one, {name}, "
        f"has other values of {stated}",
        where=where,
        hint=f"{known_families()} Name the model's config.json with --config. Other formats keep Megatron's names.",
    )


def _stated(values: Values, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield f"{name} ({arguments_for(name)}): here {printable(str(values[name]))[:60]}"
