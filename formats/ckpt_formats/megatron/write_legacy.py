"""Writing the legacy layout: a folder for each rank, with its model and its optimizer."""

from collections.abc import Sequence

from ckpt_formats.base import Part
from ckpt_formats.errors import Unsupported
from ckpt_formats.megatron.target import Target


def parts(target: Target) -> Sequence[Part]:
    """The files of every rank. Raises `Unsupported` for what Megatron could not load."""
    raise Unsupported("not yet")
