"""The folder of a run and the checkpoints in it: which is the newest whole one, and which can be removed."""

from ckpt.runs.latest import latest
from ckpt.runs.prune import prune

__all__ = ["latest", "prune"]
