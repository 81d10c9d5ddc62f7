"""Find the order in which a model registers its parameters. Optimizers number them in this order."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_formats.core.values import Value
from ckpt_formats.names.tables import table_for

UNKNOWN_ORDER = (
    "the optimizer numbers its parameters, but their order is not known from the folder: its states are copied "
    "unchanged. Add the model's config.json to the folder, or name the parameters with --param-order"
)


def numbered_only(optimizer: Value) -> bool:
    """True if the optimizer numbers its parameters and does not also name them."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    named = all(isinstance(group.get("param_names"), list) for group in groups)
    members = [group.get("params") for group in groups]
    return not named and any(isinstance(key, int) for keys in members if isinstance(keys, list) for key in keys)


def in_models_order(names: Sequence[str], config: Mapping[str, Any] | None) -> list[str] | None:
    """The names in the order in which the model registers its parameters; None if that is not known.

    Files of safetensors do not store an order. The alphabetical order is not that of the model: `layers.10` comes
    before `layers.2`.
    """
    table = table_for(config or {})
    expected = table.expected_names(config) if table and config else None
    if table is None or expected is None:
        return None
    present, known = set(names), set(expected)
    order = [name for name in expected if name in present]
    remaining = [name for name in names if name not in known]
    complete = known - present <= {table.tied.alias}
    return [*order, *remaining] if complete and all(table.ignored.fullmatch(name) for name in remaining) else None
