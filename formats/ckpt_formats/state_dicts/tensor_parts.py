"""Composite tensors as the plain tensors that they consist of.

A pickle contains a call that constructs the tensor: a function of `torch._utils` and its arguments. Tensor `w` becomes

    sparse             w.indices, w.values, w.size; w.crow_indices, w.col_indices, ... of the compressed layouts
    quantised          w.int_repr, w.scale, w.zero_point; w.scales, w.zero_points, w.axis if they are per channel
    nested             w.buffer, w.sizes, w.strides, w.storage_offsets
    of a subclass      w.<attribute> for each tensor attribute, w.data for its own elements
    of a type that NumPy lacks    w.<type>_as_uint8: the stored bytes
    conjugated, negated lazily    w.stored, and w.conj or w.neg: the operation to apply

Numbers become tensors of one element; everything else is in `w.object`, with names in the place of
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
"""The part that is not a tensor."""

Parts = dict[str, Value]

_SHARDED = ("DTensor", "ShardedTensor")
"""Classes whose tensors are one rank's shard: they are not weights."""
_NO_DATA = ("UninitializedParameter", "UninitializedBuffer")
_INTEGERS = {"QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32"}
_COMPRESSED = {
    "csr": ("crow_indices", "col_indices"),
    "bsr": ("crow_indices", "col_indices"),
    "csc": ("ccol_indices", "row_indices"),
    "bsc": ("ccol_indices", "row_indices"),
}


class HasNoData(Exception):
    """The tensor was on the device `meta`, or has no shape yet."""


def is_tensor(record: Record) -> bool:
    """Whether the object is a tensor of any kind."""
    return (record.cls.module, record.cls.name) in _BUILD or record.cls.name in _NO_DATA


def tensor_parts(record: Record, where: str) -> Parts | Leaf | None:
    """The parts of a composite tensor; a `Leaf` if it is a plain tensor; None if the object is not a tensor.

    Raises `HasNoData` for a tensor that was saved without values.
    """
    if record.cls.name in _NO_DATA:
        raise HasNoData
    build = _BUILD.get((record.cls.module, record.cls.name))
    if build is None or record.kwargs or record.new:
        return None
    try:
        return build(record.args, where)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):  # not as torch writes it: it stays an object
        return None


def class_of(record: Record) -> str:
    """The kind of tensor, as text for notices."""
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
    return {name: _as_tensor(part) for name, part in zip(names, data, strict=True) if part is not None}


def _quantized(args: Sequence[Value], where: str) -> Parts:
    storage, offset, shape, strides, (_, *numbers) = args[:5]
    names = ("scale", "zero_point") if len(numbers) == 2 else ("scales", "zero_points", "axis")
    numbers_by_name = {name: _as_tensor(part) for name, part in zip(names, numbers, strict=True)}
    base = storage.storage if isinstance(storage, StorageSlice) else storage
    dtype = _INTEGERS.get(base.cls.name)
    if dtype is None:  # several numbers in a byte
        return {"packed_as_uint8": _bytes(base, where), "size": _as_tensor(shape), **numbers_by_name}
    return {
        "int_repr": tensor_ref(storage, DTYPES[dtype], offset, tuple(shape), tuple(strides), False, where),
        **numbers_by_name,
    }


def _nested(args: Sequence[Value], where: str) -> Parts:
    return dict(zip(("buffer", "sizes", "strides", "storage_offsets"), args, strict=True))


def _special_view(args: Sequence[Value], where: str) -> Parts:
    """`_rebuild_tensor_v2` and v3 with a type that NumPy lacks, or with a lazy conjugation or negation."""
    typed = len(args) > 6 and isinstance(args[6], Global)
    storage, metadata = args[0], args[7:] if typed else args[6:]
    base = storage.storage if isinstance(storage, StorageSlice) else storage
    dtype = TORCH_DTYPES.get(args[6].name) if typed else base.dtype
    if dtype is None:
        name = args[6].name if typed else base.cls.name.removesuffix("Storage").lower()
        return {f"{name}_as_uint8": _bytes(base, where), "size": _as_tensor(args[2]), "stride": _as_tensor(args[3])}
    stored = tensor_ref(storage, dtype, args[1], tuple(args[2]), tuple(args[3]), False, where)
    marks = metadata[0] if metadata else {}
    return {"stored": stored, **{str(mark): _as_tensor(bool(is_so)) for mark, is_so in marks.items()}}


def _parameter(args: Sequence[Value], where: str) -> Parts | Leaf | None:
    inner = args[0] if isinstance(args[0], Leaf) else tensor_parts(args[0], where)
    return _with_state(inner, args[3] if len(args) > 3 else None)


def _with_class(args: Sequence[Value], where: str) -> Parts | Leaf | None:
    """`_rebuild_from_type_v2(function, class, arguments, state)`."""
    function, cls, inner_args, state = args
    if not isinstance(cls, Global) or cls.name in _SHARDED:
        return None
    if function.name in ("_rebuild_wrapper_subclass", "_rebuild_njt"):  # it has no elements of its own
        inner: Parts | Leaf | None = {}
    else:
        build = TENSOR_BUILDERS.get((function.module, function.name))
        built = Record(function, inner_args) if build is None else build(function, inner_args, where)
        inner = built if isinstance(built, TensorRef) else tensor_parts(built, where)
    parts = _with_state(inner, state)
    if isinstance(parts, dict) and cls.name not in ("Tensor", "Parameter"):
        parts[OBJECT] = Record(cls, state=parts.get(OBJECT))
    return parts


def _with_state(inner: Parts | Leaf | None, state: Value) -> Parts | Leaf | None:
    """The tensor with its attributes: tensors among them become parts of it."""
    if inner is None:
        return None
    attributes = _attributes(state)
    tensors: Parts = {}

    def leaf(value: Value, path: str) -> Value:
        if isinstance(value, Leaf):
            name = path.lstrip("/").replace("/state/", ".").replace("/", ".")
            tensors[name] = value
            return name
        return value

    other = {key: map_leaves_by_name(value, str(key), leaf) for key, value in attributes.items()}
    if isinstance(inner, TensorRef) and not tensors:
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
    parts: Parts = {**(inner if isinstance(inner, dict) else {"data": inner}), **tensors}
    if other:
        parts[OBJECT] = {**parts[OBJECT], **other} if isinstance(parts.get(OBJECT), dict) else other
    return parts


def _attributes(state: Value) -> Mapping[str, Value]:
    """The attributes of an object. `state` is its `__dict__`, or a tuple of `__dict__` and slots."""
    both = state if isinstance(state, tuple) else (state,)
    return {str(key): value for part in both if isinstance(part, dict) for key, value in part.items()}


def _from_cpu_tensor(args: Sequence[Value], where: str) -> Parts | Leaf | None:
    return args[0] if isinstance(args[0], Leaf) else None


def _from_numpy(args: Sequence[Value], where: str) -> Leaf | None:
    dtype = TORCH_DTYPES.get(args[1].name) if isinstance(args[1], Global) else None
    return array_tensor(args[0].astype(dtype)) if dtype is not None and array_tensor(args[0]) else None


def array_tensor(value: Value) -> Tensor | None:
    """A NumPy array as a tensor of the same shape and type; None if torch lacks the type."""
    if not isinstance(value, np.ndarray):
        return None
    native = value.astype(value.dtype.newbyteorder("=")) if value.dtype.kind in "iufc" else value
    return Tensor.of(ArrayBlob(native)) if DTYPES.get(native.dtype.name) == native.dtype else None


def _no_data(args: Sequence[Value], where: str) -> Parts | None:
    raise HasNoData


def _bytes(storage: Storage, where: str) -> TensorRef:
    return tensor_ref(storage, DTYPES["uint8"], 0, (storage.nbytes,), (1,), False, where)


def _as_tensor(value: Value) -> Value:
    """A number, or a list of numbers, as a tensor of bool, int64 or float64; any other value unchanged."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, (tuple, list)) and _are_numbers(value)):
        kind = np.bool_ if isinstance(value, bool) else np.float64 if _has_float(value) else np.int64
        return Tensor.of(ArrayBlob(np.array(value, kind)))
    return value


def _are_numbers(values: Sequence[Value]) -> bool:
    return all(type(value) in (int, float) for value in values)


def _has_float(value: Value) -> bool:
    return isinstance(value, float) or (isinstance(value, (tuple, list)) and any(isinstance(v, float) for v in value))


_Build = Callable[[Sequence[Value], str], "Parts | Leaf | None"]

_BUILD: dict[tuple[str, str], _Build] = {
    **{("torch._utils", name): _sparse for name in ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor")},
    ("torch._utils", "_rebuild_qtensor"): _quantized,
    ("torch._utils", "_rebuild_nested_tensor"): _nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _no_data,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _from_cpu_tensor,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _from_numpy,
    ("torch._utils", "_rebuild_xla_tensor"): _from_numpy,
    **{("torch._utils", f"_rebuild_parameter{end}"): _parameter for end in ("", "_with_state")},
    **{("torch._utils", f"_rebuild_tensor_{version}"): _special_view for version in ("v2", "v3")},
    **{("torch._tensor", f"_rebuild_from_type{end}"): _with_class for end in ("", "_v2")},
    ("torch.tensor", "_rebuild_from_type"): _with_class,
}
