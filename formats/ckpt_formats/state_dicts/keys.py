"""How a tree of state dicts is keyed: where the model's dict is, where the optimizer's, and whether that is flat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the names of styles are in `--help`, which needs no NumPy
    from ckpt_formats.core.values import Value


@dataclass(frozen=True)
class StateKeys:
    """The keys of the top level of a tree.

    With `flat`, the optimizer's dict has one level, with keys `state.<FQN>.<state>` and
    `param_groups.<FQN>.<option>`. `flatten_optimizer_state_dict` of
    `torch.distributed.checkpoint.state_dict` returns this form, and TorchTitan saves it.
    With `flat` and without `optimizer`, these entries are at the top level.
    """

    model: str | None = "model"
    """None: the names of the model's tensors are keys of the top level."""
    optimizer: str | None = "optim"
    flat: bool = False
    megatron_fsdp: bool = False
    """The tensors have the keys of Megatron-FSDP: see `engines.dcp.megatron_fsdp`."""

    def to_json(self) -> dict[str, Value]:
        """The keys as a JSON object, which `keys_of` reads."""
        content: dict[str, Value] = asdict(self)
        if not self.megatron_fsdp:  # earlier versions do not know it
            del content["megatron_fsdp"]
        return content


NESTED = StateKeys()
"""The keys in PyTorch's tutorials."""
TORCHTITAN = StateKeys(None, "optimizer", True)
ACCELERATE = StateKeys("model", "optimizer")
"""In two folders: one contains `model`, the other `optimizer`."""

MEGATRON_FSDP = StateKeys("model", "optimizer", megatron_fsdp=True)

Style = Literal["nested", "torchtitan", "accelerate", "megatron-fsdp"]
STYLES: dict[Style, StateKeys] = {
    "nested": NESTED,
    "torchtitan": TORCHTITAN,
    "accelerate": ACCELERATE,
    "megatron-fsdp": MEGATRON_FSDP,
}
"""By the names in `--help`."""


def keys_of(content: Value) -> StateKeys | None:
    """The keys whose `to_json` is `content`; None for any other content."""
    if not isinstance(content, Mapping) or set(content) - {"megatron_fsdp"} != {"model", "optimizer", "flat"}:
        return None
    model, optimizer, flat = content["model"], content["optimizer"], content["flat"]
    is_fsdp = content.get("megatron_fsdp") is True
    named = all(key is None or isinstance(key, str) for key in (model, optimizer))
    return StateKeys(model, optimizer, flat, is_fsdp) if named and isinstance(flat, bool) else None
