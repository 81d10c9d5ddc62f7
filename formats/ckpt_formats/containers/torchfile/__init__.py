"""Files of `torch.save`: read as inert data, and written. PyTorch is not needed.

file_window     bytes of a file
allow_list      which names a pickle may contain, and why others are refused
pickle_reader   pickle opcodes -> values; uses builders, numpy_arrays, record_forms
expanded_size   refuses values that become too large when their shared parts are written out
storages        tensors as views of storages
zip_archive     the zip container; legacy_stream: the format before it; same_shape: archives that differ in values only
reader          open_file, load_pickle
pickle_writer   values -> pickle
writer          layout_file, outline_file, write_file

A module is imported at the first use of its names: other readers need the types of values, and no reader of pickles.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_formats.containers.torchfile.expanded_size import check_repeated, written_size
    from ckpt_formats.containers.torchfile.file_window import ByteSource, Window
    from ckpt_formats.containers.torchfile.pickle_writer import Template, emit
    from ckpt_formats.containers.torchfile.reader import TorchFile, load_pickle, open_file, open_item
    from ckpt_formats.containers.torchfile.record_forms import CompactRecord, RecordForm, StateForm
    from ckpt_formats.containers.torchfile.same_shape import ParsedTemplate
    from ckpt_formats.containers.torchfile.storages import Storage, StorageSlice, TensorRef, blob_of, tensor_of
    from ckpt_formats.containers.torchfile.writer import (
        FileLayout,
        FileOutline,
        StorageSlot,
        StorageView,
        layout_file,
        outline_file,
        reading_chunks,
        write_file,
    )

STARTS = (b"PK", b"\x80")
"""The possible first bytes of a file of `torch.save`: those of a zip archive, and of a pickle."""

_NAMES = {
    "expanded_size": ("check_repeated", "written_size"),
    "file_window": ("ByteSource", "Window"),
    "pickle_writer": ("Template", "emit"),
    "reader": ("TorchFile", "load_pickle", "open_file", "open_item"),
    "record_forms": ("CompactRecord", "RecordForm", "StateForm"),
    "same_shape": ("ParsedTemplate",),
    "storages": ("Storage", "StorageSlice", "TensorRef", "blob_of", "tensor_of"),
    "writer": (
        "FileLayout",
        "FileOutline",
        "StorageSlot",
        "StorageView",
        "layout_file",
        "outline_file",
        "reading_chunks",
        "write_file",
    ),
}
"""The public names by module."""
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "STARTS",
    "ByteSource",
    "CompactRecord",
    "FileLayout",
    "FileOutline",
    "ParsedTemplate",
    "RecordForm",
    "StateForm",
    "Storage",
    "StorageSlice",
    "StorageSlot",
    "StorageView",
    "Template",
    "TensorRef",
    "TorchFile",
    "Window",
    "blob_of",
    "check_repeated",
    "emit",
    "layout_file",
    "load_pickle",
    "open_file",
    "open_item",
    "outline_file",
    "reading_chunks",
    "tensor_of",
    "write_file",
    "written_size",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt_formats.containers.torchfile' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"ckpt_formats.containers.torchfile.{_WHERE[name]}"), name)
    return value
