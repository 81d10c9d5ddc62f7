"""Models of NeMo 1 (`.nemo`): Megatron core's names behind a prefix, with a YAML file in place of Megatron's arguments.

`nemo.toml` has the arguments that follow from the YAML file.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from ckpt_formats.containers.yaml_entries import parse_entries
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value
from ckpt_formats.names.arguments import ARGUMENTS, updated
from ckpt_formats.names.describe import WORD_TABLE
from ckpt_formats.names.expressions import Expression, evaluate, names_of, shown_value
from ckpt_formats.names.renames import TensorRename, apply_renames
from ckpt_formats.names.tables import dialect, parse_expressions, read_table

CONFIG = "model_config.yaml"
"""The key of the YAML file in a checkpoint's extras: a text."""
_PREFIX = "model."
_OF_MEGATRON = re.compile(r"(?:model\.)?decoder\.layers\.\d+\.self_attention\.linear_qkv\.weight")
_HINT = "Name the model's config.json with --config."


def from_nemo(source: Checkpoint, *, with_arguments: bool = True) -> Checkpoint:
    """A model of NeMo under Megatron core's names, with Megatron's arguments; any other checkpoint is unchanged.

    Without arguments, a configuration must describe the model. Raises `UnsupportedError` for options that arguments
    cannot state, or whose form in the YAML file is not read.
    """
    text = source.extras.get(CONFIG)
    if source.origin.engine != "nemo" or not isinstance(text, str) or not any(map(_OF_MEGATRON.fullmatch, source)):
        return source
    renames = [
        TensorRename((name,), (name.removeprefix(_PREFIX),), tuple)
        for name in source.parameters
        if name.startswith(_PREFIX)
    ]
    renamed = apply_renames(source, renames) if renames else source
    aliases = {alias.removeprefix(_PREFIX): name.removeprefix(_PREFIX) for alias, name in source.aliases.items()}
    extras = renamed.extras
    if with_arguments and ARGUMENTS not in extras:
        arguments = arguments_of(text, source.path)
        table = renamed.parameters.get(WORD_TABLE)
        rows = table.weight.shape[:1] if table is not None else ()
        extras = {**extras, ARGUMENTS: updated(None, {**arguments, **({"padded_vocab_size": rows[0]} if rows else {})})}
    return replace(renamed, aliases=aliases, extras=extras)


def arguments_of(text: str, where: Path) -> dict[str, Value]:
    """Megatron's arguments for the model that a `model_config.yaml` describes. Raises as `from_nemo`."""
    table, entries, known = _table(), parse_entries(text, where), dialect("megatron").settings
    same = {name for one in known.read.values() for name in names_of(one)} | known.plain.keys()
    used = same | {name for part in table.values() for one in part.values() for name in names_of(one)}
    if unread := sorted(used & entries.unread):
        raise UnsupportedError(
            f"{CONFIG} states {list_names(unread)} in a form that is not read", where=where, hint=_HINT
        )
    for name, condition in table["conditions"].items():
        if not evaluate(condition, entries.values, where):
            shown = printable(shown_value(entries.values.get(name)))
            raise UnsupportedError(
                f"{CONFIG} states `{name}` {shown}, which arguments of Megatron core cannot state",
                where=where,
                hint=_HINT,
            )
    arguments: dict[str, Value] = {
        name: value for name, value in entries.values.items() if name in same and value is not None
    }
    for name, expression in table["arguments"].items():
        value = evaluate(expression, entries.values, where)
        assert value is None or isinstance(value, (bool, int, float, str))
        arguments[name] = value
    return arguments


@cache
def _table() -> Mapping[str, Mapping[str, Expression]]:
    return {name: parse_expressions(part) for name, part in read_table("nemo").items()}
