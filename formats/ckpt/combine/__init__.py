"""Checkpoints computed from several others: averages, merges of models, and a model with a LoRA adapter merged into it.

The results are indexes, like those of all edits: a tensor is computed when it is read, block by block.
What a block's values are does not depend on how the tensor is cut into blocks.
"""

from ckpt.combine.average import Average, average, ema_weights
from ckpt.combine.convert_experts import ConvertExperts, convert_lora
from ckpt.combine.lora import MergeLora, merge_lora
from ckpt.combine.merging import Merge, merge

__all__ = [
    "Average",
    "ConvertExperts",
    "Merge",
    "MergeLora",
    "average",
    "convert_lora",
    "ema_weights",
    "merge",
    "merge_lora",
]
