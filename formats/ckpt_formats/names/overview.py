"""What the tables know of each family, found by describing one small model of it to every library."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_formats.core.errors import CkptError
from ckpt_formats.names.arguments import to_arguments
from ckpt_formats.names.config import model_of, read_config
from ckpt_formats.names.expressions import names_of
from ckpt_formats.names.hyperparameters import Values
from ckpt_formats.names.llama_cpp import llama_architectures
from ckpt_formats.names.tables import DIALECTS, Family, dialect, families, hyperparameters
from ckpt_formats.names.translate import NATIVE

LIBRARIES = (*DIALECTS, "gguf", *NATIVE)
"""The dialects of tensor names: those with settings for all families first."""

_ENTRIES: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Entries of a small model's config.json, which a family's own defaults replace."""
_GUESSES: Mapping[str, Any] = {"count": 4, "natural": 1, "number": 1.0, "flag": False}
"""Values of entries that a family needs besides, by the kind of their hyperparameter."""
_SOUGHT = ("experts", "mtp_layers")
"""Optional hyperparameters that the small model has if its family can state them."""


@dataclass(frozen=True)
class FamilySummary:
    """One family: its names in config.json, and what ckpt can do with its models."""

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    libraries: tuple[str, ...]
    """The dialects that have a name for every tensor of a small model of the family."""
    in_megatron: bool
    """Whether arguments of Megatron core can state a small model of the family, and Megatron's names cover it."""
    has_experts: bool
    """Whether models of the family may have experts."""
    has_mtp: bool
    """Whether models of the family may have layers for multi-token prediction."""


def family_summaries() -> tuple[FamilySummary, ...]:
    """All families that the tables describe, sorted by name."""
    return tuple(map(_summary, families()))


def _summary(family: Family) -> FamilySummary:
    values = _small_model(family)
    libraries = tuple(_libraries(family, values))
    return FamilySummary(
        family.name,
        family.model_types,
        family.architectures,
        libraries,
        "megatron" in libraries and _has_arguments(values),
        bool(values["experts"]),
        bool(values.get("mtp_layers")),
    )


def _small_model(family: Family) -> Values:
    """The hyperparameters of a small model, with the defaults that transformers has for this family."""
    config = {**_ENTRIES, **{name: value for name, value in family.settings.defaults.items() if value is not None}}
    kinds = {one.name: one.kind for one in hyperparameters()}
    while True:
        reading = read_config(config, family)
        needed = [name for name in kinds if name in reading.problems or (name in _SOUGHT and not reading.values[name])]
        entries = {
            entry: _GUESSES[kinds[name]]
            for name in needed
            if kinds[name] in _GUESSES and name in family.settings.read
            for entry in names_of(family.settings.read[name])
            if entry not in config
        }
        if not entries:
            return reading.values
        config |= entries


def _libraries(family: Family, values: Values) -> Iterator[str]:
    for name in DIALECTS:
        try:
            model_of(family, values).stored(name)
        except CkptError:
            continue
        yield name
    if any(family.name in one.families for one in llama_architectures()):
        yield "gguf"
    yield from (name for name in NATIVE if family.name in dialect(name).other["families"])


def _has_arguments(values: Values) -> bool:
    try:
        to_arguments(values, None)
    except CkptError:
        return False
    return True
