"""Checkpoints computed from several others: averages, merges of models, and a model with a LoRA adapter.

Besides, tables with other numbers of rows.

The results are indexes, like those of all edits: a tensor is computed when it is read, block by block.
What a block's values are does not depend on how the tensor is cut into blocks.
"""

from ckpt.combine.average import Average, average, ema_weights
from ckpt.combine.convert_experts import ConvertExperts, convert_lora
from ckpt.combine.lora import MergeLora, merge_lora
from ckpt.combine.merge_models import Merge, merge
from ckpt.combine.table_rows import Resize, resize

__all__ = [
    "Average",
    "ConvertExperts",
    "Merge",
    "MergeLora",
    "Resize",
    "average",
    "convert_lora",
    "ema_weights",
    "merge",
    "merge_lora",
    "resize",
]
