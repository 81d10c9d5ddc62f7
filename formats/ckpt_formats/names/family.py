"""Find the family of a model with Megatron's names: the one whose table has exactly these names."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.names.table import NamePattern, Table
from ckpt_formats.names.tables import tables

COMPUTED = re.compile(r"(?:.*\.)?rotary_pos_emb\.inv_freq")
"""Tensors that old versions save, although all versions compute them."""
_NUMBERS = (
    (re.compile(r"(?<=layers\.)\d+(?=\.)"), "{layer}"),
    (re.compile(r"(?<=local_experts\.)\d+(?=\.)"), "{expert}"),
    (re.compile(r"(?<=\.experts\.linear_fc[12]\.(?:weight))\d+$"), "{expert}"),
)
_MAX_NAMES = 3

KNOWN = "Llama, Mistral, Qwen 2 and 3, Mixtral and GPT-2 are known, with their heads for language modelling."
_HINT = f"{KNOWN} Leave out tensors that the model does not need with --skip; other formats keep Megatron's names."


@dataclass(frozen=True)
class Family:
    """A table, and the boolean entries of the configuration on which its names depend."""

    table: Table
    flags: Mapping[str, bool]

    @property
    def names(self) -> set[str]:
        """The patterns of the Megatron names of a model with these entries."""
        conditions = {name.pattern: name.when for name in self.table.names}
        return {row.name for row in self.table.rows if self.flags.get(conditions[row.hf[0]] or "", True)}


def pattern_of(name: str) -> str:
    """The pattern for a Megatron name, as in tables: numbers become `{layer}` and `{expert}`.

    >>> pattern_of("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight")
    'decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight'
    """
    for number, place in _NUMBERS:
        name = number.sub(place, name)
    return name


def families_of(names: Iterable[str], aliases: Iterable[str] = (), *, partial: bool = False) -> list[Family]:
    """The families whose models have exactly these names; if `partial`, at least these.

    Raises `UnsupportedError` if there is none.
    """
    present, tied = set(map(pattern_of, names)), set(map(pattern_of, aliases))
    fits = [_fit(table, present, tied) for table in tables()]
    families = [fit.family for fit in fits if not fit.surplus and (partial or not fit.missing)]
    if not families:
        raise UnsupportedError(_none(min(fits, key=lambda fit: len(fit.missing) + len(fit.surplus))), hint=_HINT)
    return families


@dataclass(frozen=True)
class _Fit:
    family: Family
    missing: list[str]
    surplus: list[str]


def _fit(table: Table, present: set[str], tied: set[str]) -> _Fit:
    conditions = {name.pattern: name.when for name in table.names}

    def when(row: NamePattern) -> str | None:
        return conditions[row.hf[0]]

    def is_there(row: NamePattern) -> bool:
        return any(name in present for name in (row.name, *row.other_names))

    flags = {key: any(is_there(row) for row in table.rows if when(row) == key) for key in conditions.values() if key}
    needed = (row for row in table.rows if when(row) is None or flags[when(row) or ""])
    missing = [row.name for row in needed if not is_there(row) and row.name not in tied]
    known = {name for row in table.rows for name in (row.name, *row.other_names)}
    return _Fit(Family(table, flags), missing, sorted(present - known))


def _none(nearest: _Fit) -> str:
    return f"no known family of models has exactly these tensors. {''.join(_describe_fit(nearest))}"


def _describe_fit(fit: _Fit) -> Iterator[str]:
    yield f"The most similar one, {fit.family.table.family}, "
    problems = (("lacks", fit.surplus), ("also has", fit.missing))
    yield " and ".join(f"{verb} {_listed(names)}" for verb, names in problems if names)


def _listed(names: list[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"`{printable(name)}`" for name in names[:_MAX_NAMES]) + suffix
