"""How a tree of state dicts is keyed: where the model's dict is, where the optimizer's, and whether that is flat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the names of styles are in `--help`, which needs no NumPy
    from ckpt_formats.core.values import Value


@dataclass(frozen=True)
class StateKeys:
    """Keys of the top level.

    With `flat`, the optimizer's dict has one level, `state.<FQN>.<state>` and
    `param_groups.<FQN>.<option>`, as `flatten_optimizer_state_dict` of
    `torch.distributed.checkpoint.state_dict` makes it, and TorchTitan saves it.
    With `flat` and no `optimizer`, its entries are themselves at the top level.
    """

    model: str | None = "model"
    """None: the names of the model's tensors are themselves keys of the top level."""
    optimizer: str | None = "optim"
    flat: bool = False

    def to_json(self) -> dict[str, Value]:
        return asdict(self)


NESTED = StateKeys()
"""As PyTorch's tutorials have them."""
TORCHTITAN = StateKeys(None, "optimizer", True)
ACCELERATE = StateKeys("model", "optimizer")
"""In two folders, one of which holds `model` and the other `optimizer`."""

Style = Literal["nested", "torchtitan", "accelerate"]
STYLES: dict[Style, StateKeys] = {"nested": NESTED, "torchtitan": TORCHTITAN, "accelerate": ACCELERATE}
"""By what users call them."""


def keys_of(said: Value) -> StateKeys | None:
    """What `to_json` gave; None for anything else."""
    if not isinstance(said, Mapping) or set(said) != {"model", "optimizer", "flat"}:
        return None
    model, optimizer, flat = said["model"], said["optimizer"], said["flat"]
    named = all(key is None or isinstance(key, str) for key in (model, optimizer))
    return StateKeys(model, optimizer, flat) if named and isinstance(flat, bool) else None
