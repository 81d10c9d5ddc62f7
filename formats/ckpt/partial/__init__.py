"""Parts of a state: blocks that are recovered from an earlier one, and blocks that moved most since it was saved.

After SCAR (Qiao et al., arXiv 1810.07354).
"""

from ckpt.partial.changes import BlockChange, apply_changes, block_changes
from ckpt.partial.lost_blocks import RankSet
from ckpt.partial.recovery import recover

__all__ = ["BlockChange", "RankSet", "apply_changes", "block_changes", "recover"]
