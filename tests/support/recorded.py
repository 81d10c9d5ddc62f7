"""A restored state held against the checkpoint that the run itself saved at that step."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.tensor import Array, read

OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "maximize", "amsgrad")


def differences(mine: Checkpoint, saved: Checkpoint) -> dict[str, str]:
    """Where they are not the same: weights, masters and moments to the bit, counts of steps, options of groups."""
    return dict([*_in_names(mine, saved), *_in_values(mine, saved), *_in_groups(mine, saved)])


def _in_names(mine: Checkpoint, saved: Checkpoint) -> Iterator[tuple[str, str]]:
    names, others = ({p.name for p in one.parameters.values() if p.role != "extra"} for one in (mine, saved))
    names |= mine.aliases.keys() & others  # DCP has the weights under both names
    for name in sorted(names ^ others):
        yield name, "not restored" if name in others else "not saved"
    if not names & others:
        yield "names", "none in common"


def _in_values(mine: Checkpoint, saved: Checkpoint) -> Iterator[tuple[str, str]]:
    for name in sorted((mine.parameters.keys() | mine.aliases.keys()) & saved.parameters.keys()):
        states, others = _states(mine, mine.aliases.get(name, name)), _states(saved, name)
        if name in mine.aliases:  # its states are those of the other name
            states = {MODEL: states[MODEL]}
        for state in sorted(states.keys() ^ others.keys()):
            if not _is_fresh({**states, **others}[state]):
                yield f"{name}: {state}", "not restored" if state in others else "not saved"
        for state in sorted(states.keys() & others.keys()):
            a, b = states[state], others[state]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                yield f"{name}: {state}", f"{a.dtype} {a.shape}, saved as {b.dtype} {b.shape}"
            elif a.tobytes() != b.tobytes():
                unequal = a.reshape(-1).view(f"u{a.itemsize}") != b.reshape(-1).view(f"u{b.itemsize}")
                yield f"{name}: {state}", f"{unequal.sum()} of {a.size} values differ"
        if name in mine.aliases:
            continue
        steps = [_count(one, name) for one in (mine, saved)]
        if steps[0] != steps[1]:
            yield f"{name}: step", f"{steps[0]}, saved {steps[1]}"


def _states(checkpoint: Checkpoint, name: str) -> Mapping[str, Array]:
    states = {state: read(held) for state, held in checkpoint.parameters[name].states.items() if state != "step"}
    master = states.get(MASTER)
    if master is not None and MODEL in states and states[MODEL].dtype == master.dtype:
        assert states.pop(MODEL).tobytes() == master.tobytes()
        states[MODEL] = states.pop(MASTER)
    return states


def _count(checkpoint: Checkpoint, name: str) -> float:
    """How many steps a parameter has taken: a value, or a tensor of one element; 0 if the optimizer does not count."""
    parameter = checkpoint.parameters[name]
    held = parameter.states.get("step")
    return float(parameter.values.get("step", 0) if held is None else read(held).item())


def _is_fresh(values: Array) -> bool:
    """Is it what an optimizer begins with, whether or not it is there?"""
    return not np.any(values)


def _in_groups(mine: Checkpoint, saved: Checkpoint) -> Iterator[tuple[str, str]]:
    options, others = _options(mine), _options(saved)
    if not options or not others:
        yield "groups", "none"
    for name in sorted(options.keys() & others.keys()):
        a, b = options[name], others[name]
        for key in OPTIONS:
            if (key in a or key in b) and _plain(a.get(key)) != _plain(b.get(key)):
                yield f"{name}: group's {key}", f"{a.get(key)}, saved {b.get(key)}"


def _options(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: group.options for group in checkpoint.groups for name in group.names}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
