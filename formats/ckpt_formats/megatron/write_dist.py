"""Writing `torch_dist`: a distributed checkpoint, `common.pt` and `metadata.json`."""

from collections.abc import Sequence
from pathlib import Path

from ckpt_formats.base import Part, Receipt
from ckpt_formats.errors import Unsupported
from ckpt_formats.megatron.target import Target
from ckpt_formats.transfer import Transfer


def parts(target: Target) -> Sequence[Part]:
    """The files of every rank. Raises `Unsupported` for what Megatron could not load."""
    raise Unsupported("not yet")


def write(folder: Path, part: Part, transfer: Transfer) -> Receipt:
    """Write one file."""
    raise Unsupported("not yet")
