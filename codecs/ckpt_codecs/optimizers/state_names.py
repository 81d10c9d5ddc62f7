"""The states that optimizer steps use, by the optimizers' names for them."""

import numpy as np

from ckpt_codecs.delta import StatePair, States
from ckpt_codecs.optimizers.step import DESCENT

SECOND = "exp_avg_sq"
FIRST, MOMENTUM, LARGEST = "exp_avg", "momentum_buffer", "max_exp_avg_sq"
WEIGHTS = ("fp32", "param")


def weights_of(states: States) -> str | None:
    """Return the name of the state that the optimizer steps: float32 masters, else float32 weights; None: neither."""
    return next((name for name in WEIGHTS if name in states and states[name].dtype == np.float32), None)


def has_step_states(change: StatePair, optimizer: str, weights: str) -> bool:
    """Tell if a chunk has, before and after, the float32 states that a step of this optimizer needs."""
    needed = (weights, MOMENTUM) if optimizer in DESCENT else (weights, FIRST, SECOND)
    return all(has_state(change, name, weights) for name in needed)


def has_state(change: StatePair, name: str, weights: str) -> bool:
    """Tell if a chunk has a state before and after, in float32 and of the shape of the weights."""
    shape = change.after[weights].shape
    return all(
        name in states and states[name].dtype == np.float32 and states[name].shape == shape
        for states in (change.before, change.after)
    )
