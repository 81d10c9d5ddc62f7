"""The index of a checkpoint of EasyDeL, whose arrays are folders of zarr in nested folders.

tensorstore_index.json       {"format": "tensorstore", "prefixes": {"model": [{"path", "shape", "dtype"}, ...], ...}}
model/layers/0/kernel/       an array of zarr; what optax keeps is below tx/
run-7/                       the folder of a step

Source: eformer 0.0.99.12, serialization/serialization.py, `tree_serialize_leaves`.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpt_formats.containers.safetensors import parse_json
from ckpt_formats.containers.zarr import METADATA
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsafeError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import brief, is_natural
from ckpt_formats.engines.orbax.arrays import StoredArrays, read_arrays

INDEX = "tensorstore_index.json"


@dataclass(frozen=True)
class IndexedArray:
    """What the index states of one array."""

    path: str
    """The folder of the array in that of the checkpoint."""
    shape: Shape
    dtype: DType


def has_index(folder: Path) -> bool:
    """Whether a folder has an index of EasyDeL."""
    return (folder / INDEX).is_file()


def read_indexed(folder: Path) -> StoredArrays:
    """The arrays that the index of a folder lists, by their paths. Only metadata are read.

    Raises: IncompleteError for an array that is missing, CorruptError for one of another shape or type than listed,
    UnsafeError for paths out of the folder.
    """
    listed = _listed(folder / INDEX)
    missing = [one.path for one in listed if not any((folder / one.path / name).is_file() for name in METADATA)]
    if missing:
        text = f"{list_names(missing, printable)} is named in {INDEX}, but no array is there"
        raise IncompleteError(text, where=folder, hint="Copy all files of the checkpoint.")
    arrays = read_arrays(folder, True, paths=[one.path for one in listed])
    if inner := arrays.tensors.keys() - {one.path for one in listed}:
        raise CorruptError(f"`{printable(min(inner))}` is an array inside an array", where=folder)
    for one in listed:
        tensor = arrays.tensors[one.path]
        if (tensor.shape, tensor.dtype) != (one.shape, one.dtype):
            text = f"`{printable(one.path)}` is {tensor.dtype.name} {list(tensor.shape)}, but {INDEX} states"
            raise CorruptError(f"{text} {one.dtype.name} {list(one.shape)}", where=folder)
    return arrays


def _listed(file: Path) -> list[IndexedArray]:
    content = parse_json(read_whole(file, MAX_SMALL_JSON), file)
    try:
        if content["format"] != "tensorstore":
            raise TypeError(f"the format {brief(content['format'])}")
        entries = [*content.get("arrays", []), *(one for own in content["prefixes"].values() for one in own)]
        listed = [IndexedArray(one["path"], _shape(one["shape"]), DTYPES[one["dtype"]]) for one in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{INDEX} is not of EasyDeL's form: {brief(str(error))}", where=file) from None
    keys: list[tuple[str, ...]] = []
    for one in listed:
        parts = tuple(one.path.split("/")) if isinstance(one.path, str) else ("",)
        if not all(part and part not in (".", "..") and part.isprintable() and "\\" not in part for part in parts):
            raise UnsafeError(f"{INDEX}: a path {brief(one.path)}", where=file)
        keys.append(parts)
    # In this order a path comes right before those in its folder.
    for above, below in pairwise(sorted(keys)):
        if below[: len(above)] == above:
            text = f"{INDEX} has `{printable('/'.join(below))}` twice, or inside an array"
            raise CorruptError(text, where=file)
    return listed


def _shape(value: object) -> Shape:
    if not isinstance(value, list) or not all(is_natural(n) for n in value):
        raise TypeError(f"a shape {brief(value)}")
    return tuple(value)
