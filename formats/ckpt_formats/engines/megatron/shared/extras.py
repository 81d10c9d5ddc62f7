"""The extras of a Megatron checkpoint: arguments, schedulers, random states, counters.

These are all values that are neither tensors of the model nor optimizer states. The first rank's values are stored
under their own keys. Values of another rank that differ are stored under `ranks`, by the rank's `label`.
"""

from collections.abc import Mapping, Sequence

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.extras import extras_of_ranks, with_ranks

EXTRA_STATE = "extra_state"
"""The key of the extra that has the modules' own extra states, by name."""

_KNOWN = (
    "optimizer",
    "state",
    "param_groups",
    "fp32_from_fp16_params",
    "fp32_from_float16_params",
    "param_state",
    "param_state_sharding_type",
    "per_bucket_numel",
    "per_bucket_numel_unpadded",
)
"""Keys of an optimizer's states and groups, and of the description of their form: they are not extras."""


def label(tp: int, pp: int, other: int | None = None) -> str:
    """The name of a rank among the extras: `tp0_pp1`, followed by its expert- or data-parallel rank if there is one."""
    return f"tp{tp}_pp{pp}" + ("" if other is None else f"_{other}")


def collect_extras(
    ranks: Sequence[tuple[str, Mapping[str, Value]]], parameters: dict[str, Parameter]
) -> dict[str, Value]:
    """The extras of all ranks, given as (label, items). Tensors in them are added to `parameters`."""
    return with_ranks(*extras_of_ranks(ranks, parameters, by_entry=True))


def optimizer_items(saved: Value) -> Value:
    """The items of an optimizer that are neither states nor groups, such as the loss scaler.

    For several optimizers it is a list.
    """
    if isinstance(saved, dict) and saved and all(type(key) is int for key in saved):
        saved = [saved[number] for number in sorted(saved)]
    if isinstance(saved, (list, tuple)):
        parts = [optimizer_items(item) for item in saved]
        return parts if any(parts) else None
    if not isinstance(saved, dict):
        return None
    extras = {str(key): value for key, value in saved.items() if key not in _KNOWN}
    inner = saved.get("optimizer")
    if isinstance(inner, dict) and (inner_extras := {str(k): v for k, v in inner.items() if k not in _KNOWN}):
        extras["optimizer"] = inner_extras
    return extras
