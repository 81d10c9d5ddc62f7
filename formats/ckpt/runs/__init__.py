"""The folder of a run and the checkpoints in it: which is the newest whole one."""

from ckpt.runs.latest import Latest, PassedOver, latest

__all__ = ["Latest", "PassedOver", "latest"]
