"""In which order a model registers its parameters: by that order, optimizers number them."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_formats.core.values import Value
from ckpt_formats.names import table_for

UNKNOWN_ORDER = (
    "the optimizer numbers its parameters, and nothing in the folder says in which order: its states are carried as "
    "they are. Put the model's config.json beside them, or name them with --param-order"
)


def numbered_only(optimizer: Value) -> bool:
    """Does it number its parameters, and not name them too?"""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    named = all(isinstance(group.get("param_names"), list) for group in groups)
    members = [group.get("params") for group in groups]
    return not named and any(isinstance(key, int) for keys in members if isinstance(keys, list) for key in keys)


def in_models_order(names: Sequence[str], config: Mapping[str, Any] | None) -> list[str] | None:
    """The names in the order in which the model registers its parameters; None if that is not known.

    Files of safetensors keep no order, and an alphabet's is not the model's: `layers.10` comes before `layers.2`.
    """
    table = table_for(config or {})
    expected = table.expected_names(config) if table and config else None
    if table is None or expected is None:
        return None
    present, known = set(names), set(expected)
    order = [name for name in expected if name in present]
    rest = [name for name in names if name not in known]
    complete = known - present <= {table.tied.alias}
    return [*order, *rest] if complete and all(table.ignored.fullmatch(name) for name in rest) else None
