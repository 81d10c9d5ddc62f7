"""One output file that is a tree of values in a PyTorch archive: a part like any other."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.torchfile import FileLayout, layout_file
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value

_STEM = "archive"


def tree_part(
    file: str, tree: Value, parameters: Iterable[Parameter], role: str = "all", rank: Mapping[str, int] | None = None
) -> FilePlan:
    """The part that writes a tree. Raises `Unsupported` for values that PyTorch cannot hold."""
    layout = layout_file(tree, _STEM)
    tensors = tuple(slot.tensor for slot in layout.storages)
    return FilePlan(file, tuple(parameters), layout, layout.nbytes, role, rank or {}, tensors)


def apart(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's states, to be stored for it alone.

    Archives store one object once, however often it occurs, and what is stored once is one tensor to PyTorch. Tied
    weights want that; step counts that parameters have in common do not, since optimizers count in place.
    """
    return {state: replace(tensor) for state, tensor in states.items()}


def write_tree(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write the file, front to back."""
    layout = part.content
    assert isinstance(layout, FileLayout)
    seal = write_sealed(folder, part.file, layout.stream(transfer.chunks))
    return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())
