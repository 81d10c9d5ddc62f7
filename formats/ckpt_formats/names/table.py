"""Tables of names: what a model's configuration says its tensors are called.

A name is a pattern with the places `{layer}` and `{expert}`. `names` are in the
order in which the model registers its parameters, which is the order in which
optimizers number them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any

from ckpt_formats.containers.safetensors import is_natural

PLACES = ("layer", "expert")  # the outer one first
_MAX_NAMES = 1_000_000


@dataclass(frozen=True)
class Name:
    """A pattern, and the entry of the configuration that must be true for the model to have it."""

    pattern: str
    when: str | None = None


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor, in models whose configuration says `tie_word_embeddings`."""

    alias: str
    """The name that files leave out."""
    name: str
    unless_said: bool
    """What holds where the configuration says nothing."""


@dataclass(frozen=True)
class NamePattern:
    """One tensor of Megatron-core, and what it is in Hugging Face's terms."""

    name: str
    hf: tuple[str, ...]
    how: str = "same"
    """The key of one of `TRANSFORMS`."""
    also: tuple[str, ...] = ()
    """What Megatron calls it with other implementations of its layers."""


@dataclass(frozen=True)
class NameRow:
    """A row with true names: one tensor of Megatron-core's, of one layer and expert."""

    names: tuple[str, ...]
    """What Megatron may call it, the name of its plain layers first."""
    hf: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class ExpertStack:
    """One tensor of a running model, and what it is in the model's files: of each expert, one tensor or more."""

    name: str
    files: tuple[str, ...]
    how: str = "same"
    """The key of the one of `TRANSFORMS` that makes them of what the stack holds for an expert."""
    experts: int | None = None
    """How many are stacked along the first axis; None: the tensor is no stack and only has another name."""


@dataclass(frozen=True)
class Table:
    """One family of models."""

    family: str
    model_types: tuple[str, ...]
    """What `model_type` of a config.json may be."""
    architectures: tuple[str, ...]
    """The classes of models whose tensors these are: others of the family have other heads."""
    base_prefix: str
    """What the names of the model without its head lack."""
    ignored: re.Pattern[str]
    """Names that files may have and models do without."""
    names: tuple[Name, ...]
    count: Mapping[str, str]
    """The entries of the configuration that say how many layers and experts there are."""
    sizes: Mapping[str, str]
    """The entries that say the sizes that transforms ask for."""
    config: Mapping[str, str]
    """The entries that say all else of an architecture, by the names of its fields."""
    absent: Mapping[str, Any]
    """What transformers takes for entries that a configuration lacks."""
    tied: Tie
    rows: tuple[NamePattern, ...]
    memory: tuple[ExpertStack, ...] = ()
    """Tensors that a running model holds otherwise than its files do."""

    @property
    def gated(self) -> bool:
        """Have the feed-forward layers a gate?"""
        return any("linear_fc1" in row.name and row.how == "halves" for row in self.rows)

    @property
    def learned_positions(self) -> bool:
        return any("position_embeddings" in row.name for row in self.rows)

    @property
    def layer_norm(self) -> bool:
        """Are the norms LayerNorm, which has a bias, rather than RMSNorm?"""
        return any("layernorm.bias" in row.name for row in self.rows)

    def expected_names(self, config: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The names of all parameters, in the model's order; None if the configuration does not tell.

        The second name of a tied tensor is among them.
        """
        counts = self._counts(config)
        patterns = [name.pattern for name in self.names if name.when is None or config.get(name.when) is True]
        return None if counts is None else tuple(_expanded(patterns, counts, PLACES))

    def lines(self, config: Mapping[str, Any]) -> tuple[NameRow, ...] | None:
        """The rows of all layers and experts that a model with this configuration has, in the model's order.

        None if the configuration does not tell.
        """
        counts, expected = self._counts(config), self.expected_names(config)
        if counts is None or expected is None:
            return None
        place = {name: i for i, name in enumerate(expected)}
        lines = (line for row in self.rows for line in _lines(row, counts) if line.hf[0] in place)
        return tuple(sorted(lines, key=lambda line: place[line.hf[0]]))

    def stacks(self, config: Mapping[str, Any]) -> tuple[ExpertStack, ...]:
        """What a running model holds otherwise, with true names: of its files, those of the first expert come first."""
        counts = self._counts(config) or dict.fromkeys(PLACES, 0)
        layers = [str(i) for i in range(counts["layer"])]
        return tuple(
            ExpertStack(
                stack.name.replace("{layer}", layer),
                tuple(_expanded([file.replace("{layer}", layer) for file in stack.files], counts, PLACES)),
                stack.how,
                counts["expert"] if any("{expert}" in file for file in stack.files) else None,
            )
            for layer in layers
            for stack in self.memory
        )

    def tie(self, config: Mapping[str, Any]) -> Tie | None:
        """The tied names of a model with this configuration."""
        stated = config.get("tie_word_embeddings")
        return self.tied if (stated if isinstance(stated, bool) else self.tied.unless_said) else None

    def _counts(self, config: Mapping[str, Any]) -> dict[str, int] | None:
        counts: dict[str, int] = {}
        for place, key in self.count.items():
            value: Any = config.get(key)
            if not is_natural(value, _MAX_NAMES):
                return None
            counts[place] = value
        return counts if len(self.names) * prod(counts.values()) <= _MAX_NAMES else None


def _lines(row: NamePattern, counts: Mapping[str, int]) -> Iterator[NameRow]:
    places = places_of(row.name)
    for numbers in product(*(range(counts[place]) for place in places)):

        def numbered(pattern: str, numbers: tuple[int, ...] = numbers) -> str:
            for place, number in zip(places, numbers, strict=True):
                pattern = pattern.replace(f"{{{place}}}", str(number))
            return pattern

        yield NameRow(tuple(map(numbered, (row.name, *row.also))), tuple(map(numbered, row.hf)), row.how)


def places_of(pattern: str) -> list[str]:
    return [place for place in PLACES if f"{{{place}}}" in pattern]


def _expanded(patterns: Sequence[str], counts: Mapping[str, int], places: Sequence[str]) -> Iterator[str]:
    """Names for patterns: neighbours with a place in common are one block, repeated."""
    if not places:
        yield from patterns
        return
    place, inner = f"{{{places[0]}}}", places[1:]
    for repeated, block in groupby(patterns, lambda pattern: place in pattern):
        block_patterns = list(block)
        for i in range(counts[places[0]] if repeated else 1):
            yield from _expanded([pattern.replace(place, str(i)) for pattern in block_patterns], counts, inner)
