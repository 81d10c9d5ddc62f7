"""The states of a parameter that the rules of optimizers tell of, by the names that optimizers give them."""

import numpy as np

from ckpt_codecs.delta import StatePair, States
from ckpt_codecs.deltas.residuals.second_moments import SECOND
from ckpt_codecs.optimizers.step import DESCENT

FIRST, MOMENTUM, LARGEST = "exp_avg", "momentum_buffer", "max_exp_avg_sq"
WEIGHTS = ("fp32", "param")


def weights_of(states: States) -> str | None:
    """The state that the optimizer steps: the masters, or the weights if they are as fine."""
    return next((name for name in WEIGHTS if name in states and states[name].dtype == np.float32), None)


def has_all(change: StatePair, rule: str, weights: str) -> bool:
    """Does the chunk have, before and after, what the rule works with?"""
    needed = (weights, MOMENTUM) if rule in DESCENT else (weights, FIRST, SECOND)
    return all(is_told(change, name, weights) for name in needed)


def is_told(change: StatePair, name: str, weights: str) -> bool:
    """Is this state there before and after, in float32 and of the shape of the weights?"""
    shape = change.after[weights].shape
    return all(
        name in states and states[name].dtype == np.float32 and states[name].shape == shape
        for states in (change.before, change.after)
    )
