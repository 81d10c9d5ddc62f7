"""The state of a run as the trees that trainers give to DCP, and back."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from torch_jobs.kinds import Way
from torch_jobs.run import Run

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Position:
    """A stateful object, as a trainer's counters and data loaders are."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def extras(step: int) -> dict[str, Any]:
    """What a user saves beside model and optimizer: of each kind of leaf, one."""
    return {
        "note": "saved by a test",
        "none": None,
        "random": torch.Generator().manual_seed(step).get_state()[:16].clone(),
        "nested": {"list": [torch.arange(3) * step, {"a": 1.5}], "tuple": (1, "two", [3.0])},
        "plain": [1, 2, True],
        "a.dotted/name": {"x.y": torch.full((2, 3), float(step), dtype=torch.float64)},
    }


def tree(run: Run, way: Way, step: int) -> dict[str, Any]:
    """What is saved, or, of another run, loaded into: its tensors are then filled in place."""
    counters = Position({"step": step, "ntokens_seen": 1000 * step})
    scheduler = {"lr_scheduler": run.scheduler} if run.scheduler else {}
    if way.keys == "torchtitan":
        optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
        rest = {"train_state": counters, "dataloader": _loader(step), **scheduler}
        return {**get_model_state_dict(run.model), "optimizer": optimizer, **rest}
    if way.keys == "raw":
        scheduler = {"lr_scheduler": run.scheduler.state_dict()} if run.scheduler else {}
        return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "step": step, **scheduler}
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optim": optimizer, "train_state": counters, **scheduler, **extras(step)}


def restore(run: Run, way: Way, loaded: dict[str, Any]) -> dict[str, Any]:
    """Give a loaded tree to the run; what is left of it."""
    rest = dict(loaded)
    if way.keys == "torchtitan":
        optimizer = rest.pop("optimizer")
        model = {name: rest.pop(name) for name in get_model_state_dict(run.model)}
        set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=FLAT)
    else:
        model = rest.pop("model")
        set_optimizer_state_dict(run.model, run.optimizer, rest.pop("optim"))
    set_model_state_dict(run.model, model)
    rest.pop("lr_scheduler", None)  # it has loaded itself
    if "train_state" in rest:
        run.step = rest["train_state"].state["step"]
    return rest


def _loader(step: int) -> Position:
    """As TorchTitan's: each rank has its own key, and older releases pickle what is under it."""
    rank = distributed.get_rank()
    return Position(
        {
            "version": 1,
            "dp_world_size": distributed.get_world_size(),
            f"dp_rank_{rank}": {"pos": step * 12 + rank, "epoch": 0},
            f"pickled_{rank}": pickle.dumps({"pos": step * 12 + rank}),
        }
    )
