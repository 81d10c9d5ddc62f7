"""Files of `torch.save`: read as inert data, and written, without torch.

window          bytes of a file
policy          names that may appear, and why others may not
interpreter     pickle opcodes -> values   (keys, builders, arrays)
storages        tensors as views of storages
archive         the zip container; legacy: the one before it
reading         open_file, load_pickle
emit            values -> pickle
write           layout_file, write_file
"""

from ckpt_formats.torchfile.emit import emit
from ckpt_formats.torchfile.reading import TorchFile, load_pickle, open_file
from ckpt_formats.torchfile.storages import Storage, StorageSlice, TensorRef, tensor_of
from ckpt_formats.torchfile.write import (
    FileLayout,
    Slot,
    StorageView,
    layout_file,
    reading_chunks,
    write_file,
)

__all__ = [
    "FileLayout",
    "Slot",
    "Storage",
    "StorageSlice",
    "StorageView",
    "TensorRef",
    "TorchFile",
    "emit",
    "layout_file",
    "load_pickle",
    "open_file",
    "reading_chunks",
    "tensor_of",
    "write_file",
]
