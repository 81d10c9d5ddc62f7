"""Tensors that are more than elements of a storage, as the plain tensors they consist of.

A pickle says how torch is to build them: by a function of `torch._utils` and its arguments. So `w` becomes

    sparse             w.indices, w.values, w.size; w.crow_indices, w.col_indices, ... of the compressed layouts
    quantised          w.int_repr, w.scale, w.zero_point; w.scales, w.zero_points, w.axis where there is one per channel
    nested             w.buffer, w.sizes, w.strides, w.storage_offsets
    of a subclass      w.<attribute> for each tensor that the object has, w.data for its own elements
    of a type that NumPy lacks    w.<type>_as_uint8: the bytes as they are stored
    conjugated, negated lazily    w.stored, and w.conj or w.neg: what is to be done to them

Numbers that belong to them become tensors of one number; all else is under `w.object`, with names in the place of
tensors. Source: torch/_utils.py, torch/_tensor.py.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ckpt_formats.containers.torchfile import Storage, StorageSlice, TensorRef
from ckpt_formats.containers.torchfile.builders import TENSOR_BUILDERS, TORCH_DTYPES
from ckpt_formats.containers.torchfile.storages import tensor_ref
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.values import Global, Record, Value
from ckpt_formats.state_dicts.extras import map_leaves_by_name
from ckpt_formats.state_dicts.leaves import Leaf

OBJECT = "object"
"""The part that is no tensor."""

Parts = dict[str, Value]

_CUT = ("DTensor", "ShardedTensor")
"""Classes whose tensors are one rank's part of a whole: those are no weights."""
_NO_DATA = ("UninitializedParameter", "UninitializedBuffer")
_INTEGERS = {"QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32"}
_COMPRESSED = {
    "csr": ("crow_indices", "col_indices"),
    "bsr": ("crow_indices", "col_indices"),
    "csc": ("ccol_indices", "row_indices"),
    "bsc": ("ccol_indices", "row_indices"),
}


class HasNoData(Exception):
    """The tensor was on the device `meta`, or never got a shape."""


def is_tensor(record: Record) -> bool:
    """Is the object a tensor of some kind?"""
    return (record.cls.module, record.cls.name) in _BUILD or record.cls.name in _NO_DATA


def tensor_parts(record: Record, where: str) -> Parts | Leaf | None:
    """What a tensor consists of; a plain tensor where it is one after all; None if the object is no tensor.

    Raises `HasNoData` for one that was saved without values.
    """
    if record.cls.name in _NO_DATA:
        raise HasNoData
    build = _BUILD.get((record.cls.module, record.cls.name))
    if build is None or record.kwargs or record.new:
        return None
    try:
        return build(record.args, where)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):  # not as torch writes it: it stays as it is
        return None


def class_of(record: Record) -> str:
    """What the tensor is, for people."""
    args = record.args
    if record.cls.name.startswith("_rebuild_from_type") and len(args) == 4 and isinstance(args[1], Global):
        return "sparse" if args[1].name in ("Tensor", "Parameter") and "sparse" in str(args[0]) else args[1].name
    if record.cls.name.startswith("_rebuild_parameter") and args and isinstance(args[0], Record):
        return class_of(args[0])
    return _TITLES.get(record.cls.name, record.cls.name)


_TITLES = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_sparse_csr_tensor": "sparse",
    "_rebuild_qtensor": "quantised",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_tensor_v2": "conjugated or negated, or of a type that NumPy lacks",
    "_rebuild_tensor_v3": "of a type that NumPy lacks",
}


def _sparse(args: Sequence[Value], where: str) -> Parts | None:
    layout, data = args
    kind = layout.args[0] if isinstance(layout, Record) else getattr(layout, "name", "")
    kind = str(kind).rpartition("sparse_")[2]
    if kind == "coo":
        names = ("indices", "values", "size", "is_coalesced")[: len(data)]
    else:
        names = (*_COMPRESSED[kind], "values", "size")
    if len(names) != len(data):
        return None
    return {name: _number(part) for name, part in zip(names, data, strict=True) if part is not None}


def _quantised(args: Sequence[Value], where: str) -> Parts:
    storage, offset, shape, strides, (_, *numbers) = args[:5]
    names = ("scale", "zero_point") if len(numbers) == 2 else ("scales", "zero_points", "axis")
    said = {name: _number(part) for name, part in zip(names, numbers, strict=True)}
    whole = storage.storage if isinstance(storage, StorageSlice) else storage
    dtype = _INTEGERS.get(whole.cls.name)
    if dtype is None:  # several numbers in a byte
        return {"packed_as_uint8": _bytes(whole, where), "size": _number(shape), **said}
    return {"int_repr": tensor_ref(storage, DTYPES[dtype], offset, tuple(shape), tuple(strides), False, where), **said}


def _nested(args: Sequence[Value], where: str) -> Parts:
    return dict(zip(("buffer", "sizes", "strides", "storage_offsets"), args, strict=True))


def _viewed(args: Sequence[Value], where: str) -> Parts:
    """`_rebuild_tensor_v2` and v3 of what is no plain view: of another type, or changed whenever it is read."""
    typed = len(args) > 6 and isinstance(args[6], Global)
    storage, metadata = args[0], args[7:] if typed else args[6:]
    whole = storage.storage if isinstance(storage, StorageSlice) else storage
    dtype = TORCH_DTYPES.get(args[6].name) if typed else whole.dtype
    if dtype is None:
        name = args[6].name if typed else whole.cls.name.removesuffix("Storage").lower()
        return {f"{name}_as_uint8": _bytes(whole, where), "size": _number(args[2]), "stride": _number(args[3])}
    stored = tensor_ref(storage, dtype, args[1], tuple(args[2]), tuple(args[3]), False, where)
    marks = metadata[0] if metadata else {}
    return {"stored": stored, **{str(mark): _number(bool(is_so)) for mark, is_so in marks.items()}}


def _parameter(args: Sequence[Value], where: str) -> Parts | Leaf | None:
    inner = args[0] if isinstance(args[0], Leaf) else tensor_parts(args[0], where)
    return _with_state(inner, args[3] if len(args) > 3 else None)


def _of_type(args: Sequence[Value], where: str) -> Parts | Leaf | None:
    """`_rebuild_from_type_v2(function, class, arguments, state)`."""
    function, cls, inner_args, state = args
    if not isinstance(cls, Global) or cls.name in _CUT:
        return None
    if function.name in ("_rebuild_wrapper_subclass", "_rebuild_njt"):  # it has no elements of its own
        inner: Parts | Leaf | None = {}
    else:
        build = TENSOR_BUILDERS.get((function.module, function.name))
        made = Record(function, inner_args) if build is None else build(function, inner_args, where)
        inner = made if isinstance(made, TensorRef) else tensor_parts(made, where)
    parts = _with_state(inner, state)
    if isinstance(parts, dict) and cls.name not in ("Tensor", "Parameter"):
        parts[OBJECT] = Record(cls, state=parts.get(OBJECT))
    return parts


def _with_state(inner: Parts | Leaf | None, state: Value) -> Parts | Leaf | None:
    """The tensor with what was set on it: what is a tensor there is a part of it."""
    if inner is None:
        return None
    attributes = _attributes(state)
    found: Parts = {}

    def leaf(value: Value, path: str) -> Value:
        if isinstance(value, Leaf):
            name = path.lstrip("/").replace("/state/", ".").replace("/", ".")
            found[name] = value
            return name
        return value

    rest = {key: map_leaves_by_name(value, str(key), leaf) for key, value in attributes.items()}
    if isinstance(inner, TensorRef) and not found:
        return TensorRef(
            inner.storage,
            inner.dtype,
            inner.offset,
            inner.shape,
            inner.strides,
            inner.requires_grad,
            inner.is_parameter,
            {**(inner.attrs or {}), **attributes} or None,
        )
    parts: Parts = {**(inner if isinstance(inner, dict) else {"data": inner}), **found}
    if rest:
        parts[OBJECT] = {**parts[OBJECT], **rest} if isinstance(parts.get(OBJECT), dict) else rest
    return parts


def _attributes(state: Value) -> Mapping[str, Value]:
    """Of an object: its `__dict__`, or that and its slots."""
    both = state if isinstance(state, tuple) else (state,)
    return {str(key): value for part in both if isinstance(part, dict) for key, value in part.items()}


def _from_cpu(args: Sequence[Value], where: str) -> Parts | Leaf | None:
    return args[0] if isinstance(args[0], Leaf) else None


def _from_numpy(args: Sequence[Value], where: str) -> Leaf | None:
    dtype = TORCH_DTYPES.get(args[1].name) if isinstance(args[1], Global) else None
    return array_tensor(args[0].astype(dtype)) if dtype is not None and array_tensor(args[0]) else None


def array_tensor(value: Value) -> Tensor | None:
    """A NumPy array as a tensor; None if torch has no such."""
    if not isinstance(value, np.ndarray):
        return None
    native = value.astype(value.dtype.newbyteorder("=")) if value.dtype.kind in "iufc" else value
    return Tensor.of(ArrayBlob(native)) if DTYPES.get(native.dtype.name) == native.dtype else None


def _no_data(args: Sequence[Value], where: str) -> Parts | None:
    raise HasNoData


def _bytes(storage: Storage, where: str) -> TensorRef:
    return tensor_ref(storage, DTYPES["uint8"], 0, (storage.nbytes,), (1,), False, where)


def _number(value: Value) -> Value:
    """A number, or a list of them, as a tensor; anything else as it is."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, (tuple, list)) and _numbers(value)):
        kind = np.bool_ if isinstance(value, bool) else np.float64 if _has_float(value) else np.int64
        return Tensor.of(ArrayBlob(np.array(value, kind)))
    return value


def _numbers(values: Sequence[Value]) -> bool:
    return all(type(value) in (int, float) for value in values)


def _has_float(value: Value) -> bool:
    return isinstance(value, float) or (isinstance(value, (tuple, list)) and any(isinstance(v, float) for v in value))


_Build = Callable[[Sequence[Value], str], "Parts | Leaf | None"]

_BUILD: dict[tuple[str, str], _Build] = {
    **{("torch._utils", name): _sparse for name in ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor")},
    ("torch._utils", "_rebuild_qtensor"): _quantised,
    ("torch._utils", "_rebuild_nested_tensor"): _nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _no_data,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _from_cpu,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _from_numpy,
    ("torch._utils", "_rebuild_xla_tensor"): _from_numpy,
    **{("torch._utils", f"_rebuild_parameter{end}"): _parameter for end in ("", "_with_state")},
    **{("torch._utils", f"_rebuild_tensor_{version}"): _viewed for version in ("v2", "v3")},
    **{("torch._tensor", f"_rebuild_from_type{end}"): _of_type for end in ("", "_v2")},
    ("torch.tensor", "_rebuild_from_type"): _of_type,
}
