"""Load the weights of a checkpoint as a dict of tensors, for inference."""

import os

import torch

import ckpt
from ckpt.reading import Reading
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.interchange import to_torch


@checked
def load_file(
    source: str | os.PathLike[str] | Checkpoint,
    device: str | torch.device = "cpu",
    *,
    mmap: bool = False,
    resources: ckpt.Resources | None = None,
) -> dict[str, torch.Tensor]:
    """Load all weights and buffers of a checkpoint of any format, as `safetensors.torch.load_file` loads one file.

    `source`: a path, a URL, `chain@step`, or an opened checkpoint, such as one that is cast or renamed. Values are read
    into new memory by the threads of `resources`, decoded if they are stored encoded, and compared with the checksums
    that the files promise. Tied weights have all their names, and share memory. With `mmap` True, weights that lie in
    one piece of a local file are mapped: this takes no time and no memory until they are used, and compares nothing;
    what you write into them never changes the file, which must stay as it is meanwhile.

    Raises `CkptError`: `NotFoundError`, `CorruptError`, `IncompleteError` if parts of a weight are missing, and
    `UnsupportedError` if torch has no such dtype.
    """
    run = source if isinstance(source, Checkpoint) else ckpt.open(source)
    with Reading(run, resources=resources) as reading:
        arrays = reading.weights(mmap=mmap)
        reading.verify()
    tensors = {id(array): to_torch(array) for array in arrays.values()}
    names = {name: id(array) for name, array in arrays.items()}
    arrays.clear()
    for number in list(tensors):
        tensors[number] = tensors[number].to(device)
    return {name: tensors[number] for name, number in names.items()}
