"""The folder of a run and the checkpoints in it: which is the newest whole one, and which can be removed."""

from ckpt.runs.latest import Latest, PassedOver, latest
from ckpt.runs.prune import PrunedCheckpoint, PruneResult, prune

__all__ = ["Latest", "PassedOver", "PruneResult", "PrunedCheckpoint", "latest", "prune"]
