"""The folder of a run and the checkpoints in it: which is the newest whole one, which are new, which can be removed."""

from ckpt.runs.latest import latest
from ckpt.runs.prune import prune
from ckpt.runs.watch import watch

__all__ = ["latest", "prune", "watch"]
