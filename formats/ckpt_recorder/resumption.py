"""Resuming from a restored step with plain torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.errors import CorruptError
from ckpt_recorder.random_states import restore_random_states
from ckpt_recorder.ranks import rank_and_world
from ckpt_recorder.run import unwrap


@dataclass(frozen=True)
class ResumeState:
    """The contents of a restored step other than model and optimizer."""

    step: int
    """The number of the last step."""
    notes: Mapping[str, Any]
    """The notes of the run at that step, by name: state dicts of a scheduler or a loader, plain values."""


def resume(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    random_states: bool = True,
) -> ResumeState:
    """Load a step that `ckpt restore CHAIN FILE --to torch` wrote.

    Args:
        path: The file.
        model: The model as the run built it, with or without a DDP wrapper.
        optimizer: Its optimizer, with the same groups; None: do not load the optimizer.
        random_states: Also restore this rank's random number generators, if the run recorded them.

    Raises:
        CorruptError: The file was not written by `ckpt restore --to torch`.
        RuntimeError: The model or the optimizer does not fit (raised by torch).
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    extras = content.get("extras", {}) if isinstance(content, dict) else {}
    origin = extras.get("ckpt", {}).get("origin", {})
    step = origin.get("step") if isinstance(origin, dict) else None
    if not isinstance(step, int):
        raise CorruptError("not a step that `ckpt restore --to torch` wrote", where=str(path))
    unwrap(model).load_state_dict(content["model"])
    if optimizer is not None:
        optimizer.load_state_dict(content["optimizer"])
    notes = {name: decode(value, Path(path)) for name, value in extras.items() if name != "ckpt"}
    states = notes.pop("random_states", {}).get(f"rank-{rank_and_world()[0]:05d}")
    if random_states and states is not None:
        restore_random_states(states)
    return ResumeState(step, notes)
