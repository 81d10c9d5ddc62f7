"""In which order blocks are read: that of their places in files, in pieces for several threads."""

from ckpt.pipeline.executors import batches
from ckpt.reading.blocks import Block

Work = list[Block]
"""Blocks that one thread reads, one after another."""


def in_order(blocks: list[Block], workers: int) -> list[Work]:
    """The blocks in the order of files, in pieces of a few MiB that threads take."""
    blocks = sorted(blocks, key=_place)
    return list(batches((block.tensor.nbytes, block) for block in blocks))


def _place(block: Block) -> tuple[str, int]:
    source = block.first_source()
    return ("", 0) if source is None else (str(source.path), source.offset)
