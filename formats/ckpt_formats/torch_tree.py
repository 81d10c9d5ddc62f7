"""One output file that is a tree of values in a PyTorch archive: a part like any other."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_formats.base import Parameter, Part, Receipt
from ckpt_formats.files import write_sealed
from ckpt_formats.torchfile import layout_file
from ckpt_formats.transfer import Transfer
from ckpt_formats.values import Value

_STEM = "archive"


def tree_part(
    file: str, tree: Value, parameters: Iterable[Parameter], role: str = "all", rank: Mapping[str, int] | None = None
) -> Part:
    """The part that writes a tree. Raises `Unsupported` for values that PyTorch cannot hold."""
    layout = layout_file(tree, _STEM)
    tensors = tuple(slot.tensor for slot in layout.storages)
    return Part(file, tuple(parameters), {"tree": tree}, layout.nbytes, role, rank or {}, tensors)


def write_tree(folder: Path, part: Part, transfer: Transfer) -> Receipt:
    """Write the file, front to back."""
    layout = layout_file(part.what["tree"], _STEM)
    seal = write_sealed(folder, part.file, layout.stream(transfer.chunks))
    return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())
