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
    stated, model_type = config.get("architectures"), config.get("model_type")
    architectures = stated if isinstance(stated, list) else []
    for table in tables():
        if (
            isinstance(model_type, str)
            and model_type in table.model_types
            and (not architectures or any(architecture in table.architectures for architecture in architectures))
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
            Tie(tied["alias"], tied["name"], tied["default"]),
            tuple(_row(**row) for row in entries.pop("megatron")),
            tuple(
                ExpertStack(stack["name"], tuple(stack["files"]), stack.get("transform", "same"))
                for stack in entries.pop("memory", ())
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"table {family}: {error}") from None
    if problems := [*(f"unknown entry `{key}`" for key in entries), *_problems(table)]:
        raise ValueError(f"table {family}: {'; '.join(problems)}")
    return table


def _name(entry: Any) -> Name:
    return Name(entry) if isinstance(entry, str) else Name(entry.pop("name"), entry.pop("when"))


def _row(name: str, hf: Sequence[str], transform: str = "same", other_names: Sequence[str] = ()) -> NamePattern:
    return NamePattern(name, tuple(hf), transform, tuple(other_names))


def _problems(table: Table) -> Iterator[str]:
    """The contradictions in a table, as messages."""
    patterns = [name.pattern for name in table.names]
    conditions = {name.pattern: name.when for name in table.names}
    row_names = [name for row in table.rows for name in row.hf]
    if sorted(patterns) != sorted(row_names):
        yield f"names without one row of their own: {sorted(set(patterns) ^ set(row_names)) or 'some are in two'}"
    if {table.tied.alias, table.tied.name} - set(patterns):
        yield "it ties names that the model does not have"
    if set(table.count) - set(PLACES) or set(table.sizes) != _SIZES:
        yield "there are counts or sizes with unknown names"
    for stack in table.memory:
        if set(stack.files) - set(patterns) or stack.transform not in TRANSFORMS:
            yield f"`{stack.name}` is a stack of unknown names, or has an unknown transform"
        elif len(stack.files) != TRANSFORMS[stack.transform].count:
            count = TRANSFORMS[stack.transform].count
            yield f"`{stack.name}`: the transform has {count} tensors, not {len(stack.files)}"
    for row in table.rows:
        if row.transform not in TRANSFORMS:
            yield f"`{row.name}` has an unknown transform `{row.transform}`"
        elif len(row.hf) != TRANSFORMS[row.transform].count:
            yield f"`{row.name}`: the transform has {TRANSFORMS[row.transform].count} tensors, not {len(row.hf)}"
        if len({tuple(places_of(pattern)) for pattern in (row.name, *row.other_names, *row.hf)}) > 1:
            yield f"the names of `{row.name}` have different placeholders"
        if len({conditions.get(pattern) for pattern in row.hf}) > 1:
            yield f"`{row.name}` contains tensors that have different conditions"
        if set(places_of(row.name)) - set(table.count):
            yield f"`{row.name}` has a placeholder without a count"
