"""The tables that come with ckpt, and how a table is read: a TOML file for each family beside this module."""

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
    """The table of a model with this configuration; None if there is none for it."""
    said, model_type = config.get("architectures"), config.get("model_type")
    architectures = said if isinstance(said, list) else []
    for table in tables():
        if (
            isinstance(model_type, str)
            and model_type in table.model_types
            and (not architectures or any(one in table.architectures for one in architectures))
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
            said.pop("config", {}),
            said.pop("absent", {}),
            Tie(tied["alias"], tied["name"], tied["unless_said"]),
            tuple(_row(**row) for row in said.pop("megatron")),
            tuple(
                ExpertStack(one["name"], tuple(one["files"]), one.get("how", "same")) for one in said.pop("memory", ())
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"table {family}: {error}") from None
    if problems := [*(f"unknown entry `{key}`" for key in said), *_flaws(table)]:
        raise ValueError(f"table {family}: {'; '.join(problems)}")
    return table


def _name(said: Any) -> Name:
    return Name(said) if isinstance(said, str) else Name(said.pop("name"), said.pop("when"))


def _row(name: str, hf: Sequence[str], how: str = "same", also: Sequence[str] = ()) -> NamePattern:
    return NamePattern(name, tuple(hf), how, tuple(also))


def _flaws(table: Table) -> Iterator[str]:
    """What in a table does not fit the rest of it."""
    patterns = [name.pattern for name in table.names]
    conditions = {name.pattern: name.when for name in table.names}
    told = [name for row in table.rows for name in row.hf]
    if sorted(patterns) != sorted(told):
        yield f"names without one row of their own: {sorted(set(patterns) ^ set(told)) or 'some are in two'}"
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
