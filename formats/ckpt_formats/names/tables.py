"""Read the tables of names: a TOML file for each family in this folder."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_formats.names.table import PLACES, ExpertStack, Name, NamePattern, Table, Tie, places_of
from ckpt_formats.names.transforms import TRANSFORMS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZES = {"heads", "groups", "vocabulary"}


def table_for(config: Mapping[str, Any]) -> Table | None:
    """The table for a model with this configuration, or None."""
    stated = config.get("architectures")
    architectures = stated if isinstance(stated, list) else []
    for table in tables():
        if config.get("model_type") in table.model_types and (
            not architectures or any(one in table.architectures for one in architectures)
        ):
            return table
    return None


@cache
def tables() -> tuple[Table, ...]:
    """All tables in this folder, sorted by family."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return tuple(parse(file.stem, file.read_text("utf-8")) for file in files)


def parse(family: str, text: str) -> Table:
    """The table in a TOML text. Raises `ValueError` for missing entries, or entries that contradict each other."""
    entries = tomllib.loads(text)
    tied = entries.pop("tied")
    try:
        table = Table(
            family,
            tuple(entries.pop("model_types")),
            tuple(entries.pop("architectures")),
            entries.pop("base_prefix"),
            re.compile("|".join(entries.pop("ignored")) or "(?!)"),
            tuple(map(_name, entries.pop("names"))),
            entries.pop("count"),
            entries.pop("sizes"),
            entries.pop("config", {}),
            entries.pop("absent", {}),
            Tie(tied["alias"], tied["name"], tied["unless_said"]),
            tuple(_row(**row) for row in entries.pop("megatron")),
            tuple(
                ExpertStack(one["name"], tuple(one["files"]), one.get("how", "same"))
                for one in entries.pop("memory", ())
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"table {family}: {error}") from None
    if problems := [*(f"unknown entry `{key}`" for key in entries), *_problems(table)]:
        raise ValueError(f"table {family}: {'; '.join(problems)}")
    return table


def _name(entry: Any) -> Name:
    return Name(entry) if isinstance(entry, str) else Name(entry.pop("name"), entry.pop("when"))


def _row(name: str, hf: Sequence[str], how: str = "same", also: Sequence[str] = ()) -> NamePattern:
    return NamePattern(name, tuple(hf), how, tuple(also))


def _problems(table: Table) -> Iterator[str]:
    """The contradictions in a table, as messages."""
    patterns = [name.pattern for name in table.names]
    conditions = {name.pattern: name.when for name in table.names}
    row_names = [name for row in table.rows for name in row.hf]
    if sorted(patterns) != sorted(row_names):
        yield f"names without one row of their own: {sorted(set(patterns) ^ set(row_names)) or 'some are in two'}"
    if {table.tied.alias, table.tied.name} - set(patterns):
        yield "ties names that the model does not have"
    if set(table.count) - set(PLACES) or set(table.sizes) != _SIZES:
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
        if len({tuple(places_of(pattern)) for pattern in (row.name, *row.also, *row.hf)}) > 1:
            yield f"`{row.name}` has other places than its counterparts"
        if len({conditions.get(pattern) for pattern in row.hf}) > 1:
            yield f"`{row.name}` is made of tensors that a model has under several conditions"
        if set(places_of(row.name)) - set(table.count):
            yield f"`{row.name}` has a place that nothing counts"
