"""The plan of an output file that stores a tree of values in a PyTorch archive."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.torchfile import FileLayout, FileOutline, layout_file, outline_file
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value

_STEM = "archive"


def tree_part(
    file: str, tree: Value, parameters: Iterable[Parameter], role: str = "all", rank: Mapping[str, int] | None = None
) -> FilePlan:
    """The plan of a file that stores a tree. Raises `UnsupportedError` for values that PyTorch cannot store."""
    layout = layout_file(tree, _STEM)
    tensors = tuple(slot.tensor for slot in layout.storages)
    return FilePlan(file, tuple(parameters), layout, layout.nbytes, role, rank or {}, tensors)


def tree_outline(tree: Value) -> FileOutline:
    """What the size of such a file depends on. Raises `UnsupportedError` for values that PyTorch cannot store."""
    return outline_file(tree)


def outline_nbytes(outline: FileOutline) -> int:
    """Bytes of the file."""
    return outline.nbytes(_STEM)


def unshare_states(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a parameter's `Tensor` objects, so that the archive stores them for this parameter alone.

    An archive stores an object once, however often it occurs, and PyTorch loads it as one tensor. That is right for
    tied weights, but wrong for a step count that parameters share, because optimizers update it in place.
    """
    return {state: replace(tensor) for state, tensor in states.items()}


def write_tree(folder: Path, plan: FilePlan, transfer: Transfer) -> Receipt:
    """Write the file from front to back."""
    plan = plan.laid_out()
    layout = plan.content
    assert isinstance(layout, FileLayout)
    seal = transfer.write_sealed(folder, plan.file, layout.stream(transfer.chunks))
    return Receipt(plan.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())
