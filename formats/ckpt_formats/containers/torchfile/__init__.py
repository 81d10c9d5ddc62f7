"""Files of `torch.save`: read as inert data, and written, without torch.

window          bytes of a file
policy          names that may appear, and why others may not
interpreter     pickle opcodes -> values   (keys, builders, arrays, forms)
sharing         values that repeat their parts without end are refused
storages        tensors as views of storages
archive         the zip container; legacy: the one before it; alike: archives of one form
reading         open_file, load_pickle
emit            values -> pickle
write           layout_file, write_file
"""

from ckpt_formats.containers.torchfile.expanded_size import check_repeated
from ckpt_formats.containers.torchfile.file_window import ByteSource, Window
from ckpt_formats.containers.torchfile.pickle_writer import emit
from ckpt_formats.containers.torchfile.reader import TorchFile, load_pickle, open_file, open_item
from ckpt_formats.containers.torchfile.record_forms import CompactRecord, RecordForm
from ckpt_formats.containers.torchfile.same_shape import ParsedTemplate
from ckpt_formats.containers.torchfile.storages import Storage, StorageSlice, TensorRef, tensor_of
from ckpt_formats.containers.torchfile.writer import (
    FileLayout,
    StorageSlot,
    StorageView,
    layout_file,
    reading_chunks,
    write_file,
)

__all__ = [
    "ByteSource",
    "CompactRecord",
    "FileLayout",
    "ParsedTemplate",
    "RecordForm",
    "Storage",
    "StorageSlice",
    "StorageSlot",
    "StorageView",
    "TensorRef",
    "TorchFile",
    "Window",
    "check_repeated",
    "emit",
    "layout_file",
    "load_pickle",
    "open_file",
    "open_item",
    "reading_chunks",
    "tensor_of",
    "write_file",
]
