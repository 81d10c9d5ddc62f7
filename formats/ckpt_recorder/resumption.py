"""Resuming from a restored step with plain torch."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.values import Global, TensorName
from ckpt_formats.state_dicts.leaves import is_extra_state
from ckpt_training.composite_tensors import from_value
from ckpt_training.composite_tensors import is_value as is_composite_value
from ckpt_training.engines.run import UNOWNED, clean_name, unwrap
from ckpt_training.plain_notes import OPTIMIZER_ENTRIES, note_name
from ckpt_training.random_states import restore_random_states
from ckpt_training.ranks import rank_and_world
from ckpt_training.resumed_steps import count_from


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
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    random_states: bool = True,
) -> ResumeState:
    """Load a step that `ckpt restore CHAIN FILE --to torch` wrote.

    Args:
        path: The file.
        model: The model as the run built it. DDP, `torch.compile` and checkpointing of activations may wrap all of it
            or some of its modules; these need not be the same as in the run.
        optimizer: Its optimizer, or the list of them that the recorder had, with the same groups; None: do not load it.
        random_states: Also restore this rank's random number generators, if the run recorded them.

    A `Recorder` of this model and optimizer goes on from this step, also if the optimizer counts no steps, as SGD. A
    module with `set_extra_state` whose state the run did not record stays as it is, and a warning names it.

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
    decoder = _Decoder(Path(path), extras["ckpt"].get("tensors", {}))
    notes = {name: decoder.value(value) for name, value in extras.items() if name != "ckpt"}
    _load_model(unwrap(model), content["model"], notes, decoder)
    entries = notes.pop(OPTIMIZER_ENTRIES, {})
    if optimizer is not None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        _load_optimizers(optimizers, decoder.value(content["optimizer"]), entries)
        count_from(optimizers[0], step)
    states = notes.pop("random_states", {}).get(f"rank-{rank_and_world()[0]:05d}")
    if random_states and states is not None:
        restore_random_states(states)
    return ResumeState(step, {note_name(name): value for name, value in notes.items()})


@dataclass(frozen=True)
class _Decoder:
    """Decodes the values of a file. Parts that `torch.load` refuses are in it as typed JSON."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    """Those to which typed JSON refers, by name."""

    def value(self, value: Any) -> Any:
        """A value as it was noted."""
        if isinstance(value, dict):
            if len(value) == 1 and str(next(iter(value))).startswith("$"):
                return self._decoded(decode(value, self.path))
            return type(value)((key, self.value(one)) for key, one in value.items())
        return type(value)(map(self.value, value)) if type(value) in (list, tuple) else value

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, TensorName):
            return self.tensors[value.name]
        if isinstance(value, Global):
            dtype = getattr(torch, value.name, None)
            return dtype if isinstance(dtype, torch.dtype) else value
        if type(value) is dict:
            return {key: self._decoded(one) for key, one in value.items()}
        return type(value)(map(self._decoded, value)) if type(value) in (list, tuple) else value


def _load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any], entries: Mapping[int, Mapping[str, Any]]
) -> None:
    """Load each optimizer from its groups, which follow one another. `entries`: what else its state dict had."""
    at = 0
    for number, optimizer in enumerate(optimizers):
        groups = saved["param_groups"][at : at + len(optimizer.param_groups)]
        at += len(optimizer.param_groups)
        names = [name for group in groups for name in group["params"]]
        state = {
            name: {key: from_value(value) for key, value in saved["state"][name].items()}
            for name in names
            if name in saved["state"]
        }
        further = dict(entries.get(number, {}))
        every = {**state, **further.pop("state", {})}
        optimizer.load_state_dict({"state": every, "param_groups": groups, **further})
        _restore_dtypes(optimizer, names, state)


def _restore_dtypes(optimizer: torch.optim.Optimizer, names: Sequence[Any], saved: Mapping[Any, Any]) -> None:
    """Give states the dtypes that they were saved with. torch converts them to those of the weights."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for name, parameter in zip(names, parameters, strict=False):
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved.get(name, {}).items():
            current = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and current.dtype != value.dtype:
                loaded[key] = value.clone().to(current.device)


def _load_model(model: nn.Module, saved: Mapping[str, Any], notes: dict[str, Any], decoder: _Decoder) -> None:
    """Load weights and buffers under the names that they have in this model. Takes its extra states out of `notes`."""
    names = {name: clean_name(name) for name in model.state_dict()}
    notes |= {name: decoder.value(value) for name, value in saved.items() if is_extra_state(name)}
    saved = {name: value for name, value in saved.items() if not is_extra_state(name)}
    values = {name: saved[clean] for name, clean in names.items() if clean in saved}
    others = (name for name in saved if name not in names.values() and not UNOWNED.fullmatch(name))
    values |= {name: saved[name] for name in others}  # torch refuses these
    values |= {
        name: from_value(notes.pop(clean)) for name, clean in names.items() if is_composite_value(notes.get(clean))
    }
    missing = []
    for name, clean in names.items():
        if name not in values and is_extra_state(clean):
            if clean in notes:
                values[name] = notes.pop(clean)
            else:
                missing.append(clean)
                values[name] = model.state_dict()[name]
    if missing:
        warnings.warn(f"the step has no {', '.join(missing[:3])}: these stay as the model has them", stacklevel=3)
    model.load_state_dict(values)
