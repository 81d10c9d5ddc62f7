"""Tables of names: the names of a model's tensors, as a function of its configuration.

A name is a pattern with the placeholders `{layer}` and `{expert}`. `names` are in the order in which the model
registers its parameters. Optimizers number them in this order.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any

from ckpt_formats.core.claims import MAX_EXPECTED_NAMES
from ckpt_formats.core.values import is_natural

PLACES = ("layer", "expert")
"""The placeholders, the outer one first."""


@dataclass(frozen=True)
class Name:
    """A pattern, and the entry of the configuration that must be true if the model has it; None: it always has it."""

    pattern: str
    when: str | None = None


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor, in models whose configuration states `tie_word_embeddings`."""

    alias: str
    """The name that files omit."""
    name: str
    default: bool
    """Whether the tensors are tied if the configuration does not state it."""


@dataclass(frozen=True)
class NamePattern:
    """The name pattern of one Megatron tensor, and of the Hugging Face tensors that it contains."""

    name: str
    hf: tuple[str, ...]
    transform: str = "same"
    """The key of a transform in `TRANSFORMS`."""
    other_names: tuple[str, ...] = ()
    """Its names in Megatron's other layer implementations."""


@dataclass(frozen=True)
class NameRow:
    """The names of one Megatron tensor, of one layer and expert, and of the Hugging Face tensors that it contains."""

    names: tuple[str, ...]
    """Its possible names in Megatron; the name in plain layers is the first."""
    hf: tuple[str, ...]
    transform: str


@dataclass(frozen=True)
class ExpertStack:
    """One tensor of a model in memory, and the tensors that it is in files: one or more for each expert."""

    name: str
    files: tuple[str, ...]
    transform: str = "same"
    """The key of the transform in `TRANSFORMS` from an expert's part of the stack to its tensors in files."""
    experts: int | None = None
    """The number of experts along the first axis; None: the tensor is not a stack, it only has another name."""


@dataclass(frozen=True)
class Table:
    """The names of one family of models."""

    family: str
    model_types: tuple[str, ...]
    """The values of `model_type` in a config.json."""
    architectures: tuple[str, ...]
    """The model classes with these tensors. Other classes of the family have other heads."""
    base_prefix: str
    """The prefix of the names that the model without its head does not have."""
    ignored: re.Pattern[str]
    """Names that files may have, but models do not need."""
    names: tuple[Name, ...]
    count: Mapping[str, str]
    """The configuration's entries for the numbers of layers and experts, by placeholder."""
    sizes: Mapping[str, str]
    """The configuration's entries for the sizes that transforms need."""
    config: Mapping[str, str]
    """The configuration's entries for the other fields of an `Architecture`, by field."""
    absent: Mapping[str, Any]
    """The defaults of transformers for entries that a configuration does not have."""
    tied: Tie
    rows: tuple[NamePattern, ...]
    memory: tuple[ExpertStack, ...] = ()
    """Tensors that have another form in memory than in files."""

    @property
    def gated(self) -> bool:
        """True if the feed-forward layers have a gate."""
        return any("linear_fc1" in row.name and row.transform == "gate_and_up" for row in self.rows)

    @property
    def learned_positions(self) -> bool:
        """True if positions are learned, not rotary."""
        return any("position_embeddings" in row.name for row in self.rows)

    @property
    def layer_norm(self) -> bool:
        """True if the norms are LayerNorm, which has a bias; False if they are RMSNorm."""
        return any("layernorm.bias" in row.name for row in self.rows)

    def expected_names(self, config: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The names of all parameters, in the model's order; None if the configuration does not state the counts.

        They include the second name of a tied tensor.
        """
        counts = self._counts(config)
        patterns = [name.pattern for name in self.names if name.when is None or config.get(name.when) is True]
        return None if counts is None else tuple(_expanded(patterns, counts, PLACES))

    def lines(self, config: Mapping[str, Any]) -> tuple[NameRow, ...] | None:
        """The rows of all layers and experts of a model with this configuration, in the model's order.

        None if the configuration does not state the counts.
        """
        counts, expected = self._counts(config), self.expected_names(config)
        if counts is None or expected is None:
            return None
        place = {name: i for i, name in enumerate(expected)}
        lines = (line for row in self.rows for line in _lines(row, counts) if line.hf[0] in place)
        return tuple(sorted(lines, key=lambda line: place[line.hf[0]]))

    def stacks(self, config: Mapping[str, Any]) -> tuple[ExpertStack, ...]:
        """The tensors with another form in memory, for all layers. `files` are in the order of experts."""
        counts = self._counts(config) or dict.fromkeys(PLACES, 0)
        layers = [str(i) for i in range(counts["layer"])]
        return tuple(
            ExpertStack(
                stack.name.replace("{layer}", layer),
                tuple(_expanded([file.replace("{layer}", layer) for file in stack.files], counts, PLACES)),
                stack.transform,
                counts["expert"] if any("{expert}" in file for file in stack.files) else None,
            )
            for layer in layers
            for stack in self.memory
        )

    def tie(self, config: Mapping[str, Any]) -> Tie | None:
        """The tied names of a model with this configuration, or None."""
        stated = config.get("tie_word_embeddings")
        return self.tied if (stated if isinstance(stated, bool) else self.tied.default) else None

    def _counts(self, config: Mapping[str, Any]) -> dict[str, int] | None:
        counts: dict[str, int] = {}
        for place, key in self.count.items():
            value: Any = config.get(key)
            if not is_natural(value, MAX_EXPECTED_NAMES):
                return None
            counts[place] = value
        return counts if len(self.names) * prod(counts.values()) <= MAX_EXPECTED_NAMES else None


def _lines(row: NamePattern, counts: Mapping[str, int]) -> Iterator[NameRow]:
    places = places_of(row.name)
    for numbers in product(*(range(counts[place]) for place in places)):

        def numbered(pattern: str, numbers: tuple[int, ...] = numbers) -> str:
            for place, number in zip(places, numbers, strict=True):
                pattern = pattern.replace(f"{{{place}}}", str(number))
            return pattern

        yield NameRow(tuple(map(numbered, (row.name, *row.other_names))), tuple(map(numbered, row.hf)), row.transform)


def places_of(pattern: str) -> list[str]:
    """The placeholders in a pattern, the outer one first."""
    return [place for place in PLACES if f"{{{place}}}" in pattern]


def _expanded(patterns: Sequence[str], counts: Mapping[str, int], places: Sequence[str]) -> Iterator[str]:
    """The names for patterns. Consecutive patterns with the same placeholder are repeated as one block."""
    if not places:
        yield from patterns
        return
    place, inner = f"{{{places[0]}}}", places[1:]
    for repeated, block in groupby(patterns, lambda pattern: place in pattern):
        block_patterns = list(block)
        for i in range(counts[places[0]] if repeated else 1):
            yield from _expanded([pattern.replace(place, str(i)) for pattern in block_patterns], counts, inner)
