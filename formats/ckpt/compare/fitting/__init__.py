"""Whether a checkpoint fits a model, before a job loads it.

`expected` has the names and shapes of a model, `fit` compares a checkpoint with them, and `renamings` looks for other
names under which it would fit.
"""

from ckpt.compare.fitting.fit import Fit, check

__all__ = ["Fit", "check"]
