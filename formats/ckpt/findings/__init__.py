"""Everything that is wrong with a checkpoint, also with one that cannot be opened."""

from ckpt.findings.checks import find_problems, verify

__all__ = ["find_problems", "verify"]
