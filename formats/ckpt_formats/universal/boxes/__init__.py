"""Checkpoints of boxes: each rank of a live job saves the blocks of tensors that it has, in a pack of its own.

The writers are imported at the first use of their names: readers need the table alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_formats.universal.boxes.assembling import CheckpointNotes, assemble
    from ckpt_formats.universal.boxes.rank_pack import RankBox, RankPack, RankValues
    from ckpt_formats.universal.boxes.receipt import PackReceipt

__all__ = ["CheckpointNotes", "PackReceipt", "RankBox", "RankPack", "RankValues", "assemble"]

_MODULES = {
    "CheckpointNotes": "assembling",
    "PackReceipt": "receipt",
    "RankBox": "rank_pack",
    "RankPack": "rank_pack",
    "RankValues": "rank_pack",
    "assemble": "assembling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ckpt_formats.universal.boxes' has no attribute {name!r}")
    value = getattr(import_module(f"ckpt_formats.universal.boxes.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
