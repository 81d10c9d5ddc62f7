"""Tables of names: what a model's configuration says its tensors are called.

A name is a pattern with the places `{layer}` and `{expert}`. `names` are in the
order in which the model registers its parameters, which is the order in which
optimizers number them.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from ckpt_formats.names.transforms import TRANSFORMS
from ckpt_formats.safetensors_file import natural

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PLACES = ("layer", "expert")  # the outer one first
_SIZES = {"heads", "groups", "vocabulary"}
_MOST_NAMES = 1_000_000


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
class Row:
    """One tensor of Megatron-core, and what it is in Hugging Face's terms."""

    name: str
    hf: tuple[str, ...]
    how: str = "same"
    """The key of one of `TRANSFORMS`."""
    also: tuple[str, ...] = ()
    """What Megatron calls it with other implementations of its layers."""


@dataclass(frozen=True)
class Stack:
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
    tied: Tie
    rows: tuple[Row, ...]
    memory: tuple[Stack, ...] = ()
    """Tensors that a running model holds otherwise than its files do."""

    def expected_names(self, config: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The names of all parameters, in the model's order; None if the configuration does not tell.

        The second name of a tied tensor is among them.
        """
        counts = self._counts(config)
        held = [name.pattern for name in self.names if name.when is None or config.get(name.when) is True]
        return None if counts is None else tuple(_expanded(held, counts, _PLACES))

    def stacks(self, config: Mapping[str, Any]) -> tuple[Stack, ...]:
        """What a running model holds otherwise, with true names: of its files, those of the first expert come first."""
        counts = self._counts(config) or dict.fromkeys(_PLACES, 0)
        layers = [str(i) for i in range(counts["layer"])]
        return tuple(
            Stack(
                stack.name.replace("{layer}", layer),
                tuple(_expanded([file.replace("{layer}", layer) for file in stack.files], counts, _PLACES)),
                stack.how,
                counts["expert"] if any("{expert}" in file for file in stack.files) else None,
            )
            for layer in layers
            for stack in self.memory
        )

    def tie(self, config: Mapping[str, Any]) -> Tie | None:
        """The tied names of a model with this configuration."""
        said = config.get("tie_word_embeddings")
        return self.tied if (said if isinstance(said, bool) else self.tied.unless_said) else None

    def _counts(self, config: Mapping[str, Any]) -> dict[str, int] | None:
        counts: dict[str, int] = {}
        for place, key in self.count.items():
            said: Any = config.get(key)
            if not natural(said, _MOST_NAMES):
                return None
            counts[place] = said
        return counts if len(self.names) * prod(counts.values()) <= _MOST_NAMES else None


def table_for(config: Mapping[str, Any]) -> Table | None:
    """The table of a model with this configuration; None if there is none for it."""
    said = config.get("architectures")
    architectures = said if isinstance(said, list) else []
    for table in tables():
        if config.get("model_type") in table.model_types and (
            not architectures or any(one in table.architectures for one in architectures)
        ):
            return table
    return None


@cache
def tables() -> tuple[Table, ...]:
    """All tables there are."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return tuple(parse(file.stem, file.read_text("utf-8")) for file in files)


def parse(family: str, text: str) -> Table:
    """The table that a TOML text says. Raises `ValueError` for one that contradicts itself."""
    said = tomllib.loads(text)
    tied = said.pop("tied")
    try:
        table = Table(
            family,
            tuple(said.pop("model_types")),
            tuple(said.pop("architectures")),
            said.pop("base_prefix"),
            re.compile("|".join(said.pop("ignored")) or "(?!)"),
            tuple(map(_name, said.pop("names"))),
            said.pop("count"),
            said.pop("sizes"),
            Tie(tied["alias"], tied["name"], tied["unless_said"]),
            tuple(_row(**row) for row in said.pop("megatron")),
            tuple(Stack(one["name"], tuple(one["files"]), one.get("how", "same")) for one in said.pop("memory", ())),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"table {family}: {error}") from None
    if flaws := [*(f"unknown entry `{key}`" for key in said), *_flaws(table)]:
        raise ValueError(f"table {family}: {'; '.join(flaws)}")
    return table


def _name(said: Any) -> Name:
    return Name(said) if isinstance(said, str) else Name(said.pop("name"), said.pop("when"))


def _row(name: str, hf: Sequence[str], how: str = "same", also: Sequence[str] = ()) -> Row:
    return Row(name, tuple(hf), how, tuple(also))


def _flaws(table: Table) -> Iterator[str]:
    """What in a table does not fit the rest of it."""
    patterns = [name.pattern for name in table.names]
    told = [name for row in table.rows for name in row.hf]
    if sorted(patterns) != sorted(told):
        yield f"names without one row of their own: {sorted(set(patterns) ^ set(told)) or 'some are in two'}"
    if {table.tied.alias, table.tied.name} - set(patterns):
        yield "ties names that the model does not have"
    if set(table.count) - set(_PLACES) or set(table.sizes) != _SIZES:
        yield "counts or sizes of unknown names"
    for stack in table.memory:
        if set(stack.files) - set(patterns) or stack.how not in TRANSFORMS:
            yield f"`{stack.name}` is a stack of unknown names, or by an unknown transform"
        elif len(stack.files) != TRANSFORMS[stack.how].pieces:
            yield f"`{stack.name}`: `{stack.how}` makes {TRANSFORMS[stack.how].pieces} tensors, not {len(stack.files)}"
    for row in table.rows:
        if row.how not in TRANSFORMS:
            yield f"`{row.name}` is made by an unknown transform `{row.how}`"
        elif len(row.hf) != TRANSFORMS[row.how].pieces:
            yield f"`{row.name}`: `{row.how}` makes {TRANSFORMS[row.how].pieces} tensors, not {len(row.hf)}"
        if len({tuple(_places(pattern)) for pattern in (row.name, *row.also, *row.hf)}) > 1:
            yield f"`{row.name}` has other places than its counterparts"
        if set(_places(row.name)) - set(table.count):
            yield f"`{row.name}` has a place that nothing counts"


def _places(pattern: str) -> list[str]:
    return [place for place in _PLACES if f"{{{place}}}" in pattern]


def _expanded(patterns: Sequence[str], counts: Mapping[str, int], places: Sequence[str]) -> Iterator[str]:
    """Names for patterns: neighbours with a place in common are one block, repeated."""
    if not places:
        yield from patterns
        return
    place, inner = f"{{{places[0]}}}", places[1:]
    for repeated, block in groupby(patterns, lambda pattern: place in pattern):
        held = list(block)
        for i in range(counts[places[0]] if repeated else 1):
            yield from _expanded([pattern.replace(place, str(i)) for pattern in held], counts, inner)
