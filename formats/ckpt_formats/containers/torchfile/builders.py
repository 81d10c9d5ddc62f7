"""Values for the few calls that every checkpoint contains. All other calls stay `Record`s.

Each builder takes the arguments that the file gives, which may be anything,
and returns a complete and checked value. Raises `CorruptError` or `UnsafeError`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

from ckpt_formats.containers.keys import KeyHashes, check_key
from ckpt_formats.containers.torchfile import numpy_arrays as arrays
from ckpt_formats.containers.torchfile.allow_list import (
    BUILTINS,
    MAX_GLOBAL,
    NOTHING_RAN,
    NUMPY_CORE,
    class_like,
    nested_refusal,
)
from ckpt_formats.containers.torchfile.record_forms import CompactRecord
from ckpt_formats.containers.torchfile.storages import Storage, StorageSlice, TensorRef, tensor_ref
from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Global, Record, Size, StdDict, Value

Args = tuple[Value, ...]
Builder = Callable[[Global, Args, str], Value]
"""Takes the called name, its arguments, and the place of the pickle for messages."""

_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}
TORCH_DTYPES: dict[str, DType] = {**DTYPES, **{alias: DTYPES[name] for alias, name in _DTYPE_ALIASES.items()}}

_PLAIN_TENSORS = (
    Global("torch", "Tensor"),
    Global("torch.nn.parameter", "Parameter"),
)
_BY_IDENTITY = frozenset({Record, TensorRef, Storage})
_MAX_KEY_BITS = 64
_FLAT_KEYS = frozenset({str, CompactRecord})


def hashable(key: Value, where: str, hashes: KeyHashes | None = None) -> Value:
    """The same key of a dict, or element of a set (see `containers.keys`).

    Raises `UnsafeError` if it cannot be hashed, or not quickly.

    `hashes`: those of the other keys of the same dict or set.
    """
    if type(key) not in _FLAT_KEYS:
        if type(key) is int and key.bit_length() > _MAX_KEY_BITS:
            raise UnsafeError(f"an integer of {key.bit_length():,} bits is a key or an element of a set", where=where)
        check_key(key, where, _BY_IDENTITY)
        if hashes is not None and type(key) not in _BY_IDENTITY:
            hashes.add(key, where)
    return key


def build_tensor(cls: Global, args: Args, where: str) -> Value:
    """`_rebuild_tensor(storage, offset, size, stride)` and v2, with requires_grad, hooks[, metadata]."""
    if len(args) < 4 or len(args) > 7:
        raise _malformed(cls, where)
    storage = args[0]
    if len(args) == 7 and args[6]:
        return Record(cls, args)  # conjugated or negated lazily: the stored values are not those of the tensor
    if type(storage) is Storage:
        dtype = storage.dtype
    elif type(storage) is StorageSlice:
        dtype = storage.storage.dtype
    else:
        raise _malformed(cls, where)
    if dtype is None:
        return Record(cls, args)
    tensor = _tensor(cls, args, dtype, where)
    if len(args) > 5 and args[5]:
        tensor.attrs = {"_backward_hooks": args[5]}
    return tensor


def build_typed_tensor(cls: Global, args: Args, where: str) -> Value:
    """`_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])`."""
    if len(args) not in (7, 8) or type(args[0]) not in (Storage, StorageSlice):
        raise _malformed(cls, where)
    dtype = TORCH_DTYPES.get(args[6].name) if type(args[6]) is Global and args[6].module == "torch" else None
    if dtype is None or (len(args) == 8 and args[7]):
        return Record(cls, args)
    return _tensor(cls, args, dtype, where)


def build_parameter(cls: Global, args: Args, where: str) -> Value:
    """`_rebuild_parameter(tensor, requires_grad, hooks)`, or the same with a state as fourth argument."""
    if len(args) not in (3, 4) or type(args[1]) is not bool:
        raise _malformed(cls, where)
    if type(args[0]) is not TensorRef:
        return Record(cls, args)
    return replace(args[0], requires_grad=args[1], is_parameter=True, attrs=_attrs(args[3:]))


def build_with_attributes(cls: Global, args: Args, where: str) -> Value:
    """`_rebuild_from_type_v2(function, type, arguments, state)`: a tensor that has attributes or another class."""
    if len(args) != 4 or type(args[0]) is not Global or type(args[2]) is not tuple:
        raise _malformed(cls, where)
    build = TENSOR_BUILDERS.get((args[0].module, args[0].name))
    if build is None or args[1] not in _PLAIN_TENSORS or not isinstance(args[3], dict):
        return Record(cls, args)
    tensor = build(args[0], args[2], where)
    if type(tensor) is not TensorRef or tensor.attrs:
        return Record(cls, args)
    return replace(tensor, attrs=_attrs(args[3:]), is_parameter=tensor.is_parameter or args[1].name == "Parameter")


def build_size(cls: Global, args: Args, where: str) -> Value:
    """`torch.Size(lengths)`."""
    if len(args) != 1 or not _is_shape(args[0]):
        raise _malformed(cls, where)
    return Size(args[0])


def build_dict(cls: Global, args: Args, where: str) -> Value:
    """`OrderedDict()`, `OrderedDict(pairs)`, `defaultdict(factory)`, `Counter(dict)`."""
    result = StdDict(cls)
    if cls.name == "defaultdict" and args:
        result.factory, args = args[0], args[1:]
        if result.factory is not None and type(result.factory) is not Global:
            raise _malformed(cls, where)
    if len(args) > 1:
        raise _malformed(cls, where)
    hashes = KeyHashes()
    for content in args:
        pairs = content.items() if isinstance(content, dict) else content
        if not isinstance(content, (dict, list, tuple)):
            raise _malformed(cls, where)
        for pair in pairs:
            if type(pair) not in (list, tuple) or len(pair) != 2:
                raise _malformed(cls, where)
            result[hashable(pair[0], where, hashes)] = pair[1]
    return result


def build_set(cls: Global, args: Args, where: str) -> Value:
    """`set(elements)` and `frozenset(elements)`."""
    if len(args) > 1 or (args and type(args[0]) not in (list, tuple, set, frozenset)):
        raise _malformed(cls, where)
    hashes = KeyHashes()
    elements = [hashable(element, where, hashes) for element in (args[0] if args else ())]
    return set(elements) if cls.name == "set" else frozenset(elements)


def build_bytes(cls: Global, args: Args, where: str) -> Value:
    """`bytes()` and `_codecs.encode(text, "latin1")`: how protocol 2 writes byte strings."""
    if not args and cls.name == "bytes":
        return b""
    if len(args) == 1 and type(args[0]) is bytes and cls.name == "bytes":
        return args[0]
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise UnsafeError(f"the pickle calls {cls} for something other than bytes", where=where, hint=NOTHING_RAN)
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise CorruptError("a byte string contains characters that are not bytes", where=where) from None


def build_bytearray(cls: Global, args: Args, where: str) -> Value:
    """`bytearray(bytes)`, or with the arguments that `build_bytes` takes."""
    if not args:
        return bytearray()
    if len(args) == 1 and type(args[0]) is bytes:
        return bytearray(args[0])
    return bytearray(build_bytes(cls, args, where))


def build_complex(cls: Global, args: Args, where: str) -> Value:
    """`complex(real, imag)`."""
    if len(args) != 2 or not all(type(part) in (int, float) for part in args):
        raise _malformed(cls, where)
    try:
        return complex(*args)
    except OverflowError:
        raise _malformed(cls, where) from None


def build_nested(cls: Global, args: Args, where: str) -> Value:
    """`getattr(cls, "Name")`: a class inside a class, or a member of an enumeration.

    Only the former becomes a `Global`, because only a class may be called later.
    """
    if len(args) == 2 and type(args[0]) is Record and type(args[1]) is str and _is_member(args[1]):
        return Record(cls, args)  # a method of an object, such as a hook; a call of it is refused
    if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
        raise UnsafeError("the pickle takes an attribute of an object", where=where, hint=NOTHING_RAN)
    outer, name = args
    if reason := nested_refusal(outer.module, outer.name, name):
        raise UnsafeError(f"the pickle names {outer}.{name:.80}, which {reason}", where=where, hint=NOTHING_RAN)
    return Global(outer.module, f"{outer.name}.{name}") if class_like(name) else Record(cls, args)


def _is_member(name: str) -> bool:
    return name.isidentifier() and not name.startswith("__") and len(name) <= MAX_GLOBAL


def build_generic(cls: Global, args: Args, where: str) -> Value:
    """`operator.getitem(typing.Dict, (str, int))`: a type with parameters."""
    if len(args) != 2 or type(args[0]) is not Global or args[0].module != "typing":
        raise UnsafeError("the pickle takes an item of an object", where=where, hint=NOTHING_RAN)
    return Record(cls, args)


def build_old_object(cls: Global, args: Args, where: str) -> Value:
    """`copyreg._reconstructor(cls, object, None)`: how protocols 0 and 1 construct an object."""
    if len(args) != 3 or type(args[0]) is not Global:
        raise _malformed(cls, where)
    if args[1] in [Global(module, "object") for module in BUILTINS] and args[2] is None:
        return Record(args[0], new=True)
    return Record(cls, args)


def build_unfilled_array(cls: Global, args: Args, where: str) -> Value:
    """`numpy.core.multiarray._reconstruct(ndarray, (0,), b"b")`: a later BUILD fills the array."""
    if not args or args[0] != Global("numpy", "ndarray"):
        return Record(cls, args)  # a subclass of arrays
    return arrays.unfilled_array()


def build_scalar(cls: Global, args: Args, where: str) -> Value:
    """`numpy.core.multiarray.scalar(dtype, bytes)`."""
    try:
        return arrays.scalar_of(args, where)
    except UnsupportedError:  # a date, a row of a table: it stays a call
        return Record(cls, args)


def build_buffer_array(cls: Global, args: Args, where: str) -> Value:
    """`numpy.core.numeric._frombuffer(bytes, dtype, shape, order)`."""
    try:
        return arrays.buffer_array(args, where)
    except UnsupportedError:
        return Record(cls, args)


TENSOR_BUILDERS: dict[tuple[str, str], Builder] = {
    ("torch._utils", "_rebuild_tensor"): build_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): build_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): build_typed_tensor,
    ("torch._utils", "_rebuild_parameter"): build_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): build_parameter,
}

CLASS_BUILDERS: dict[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): build_dict,
    ("collections", "defaultdict"): build_dict,
    ("collections", "Counter"): build_dict,
    ("torch", "Size"): build_size,
    **{(module, "set"): build_set for module in BUILTINS},
    **{(module, "frozenset"): build_set for module in BUILTINS},
    **{(module, "bytes"): build_bytes for module in BUILTINS},
    **{(module, "bytearray"): build_bytearray for module in BUILTINS},
    **{(module, "complex"): build_complex for module in BUILTINS},
}
"""Classes, which a pickle may also construct with `__new__`."""

BUILDERS: dict[tuple[str, str], Builder] = {
    **TENSOR_BUILDERS,
    **CLASS_BUILDERS,
    ("torch._tensor", "_rebuild_from_type_v2"): build_with_attributes,
    ("torch._tensor", "_rebuild_from_type"): build_with_attributes,
    ("torch.tensor", "_rebuild_from_type"): build_with_attributes,
    ("_codecs", "encode"): build_bytes,
    ("copyreg", "_reconstructor"): build_old_object,
    ("copy_reg", "_reconstructor"): build_old_object,
    **{(module, "getattr"): build_nested for module in BUILTINS},
    ("_operator", "getitem"): build_generic,
    **{(f"{core}.multiarray", "_reconstruct"): build_unfilled_array for core in NUMPY_CORE},
    **{(f"{core}.multiarray", "scalar"): build_scalar for core in NUMPY_CORE},
    **{(f"{core}.numeric", "_frombuffer"): build_buffer_array for core in NUMPY_CORE},
}


def _tensor(cls: Global, args: Args, dtype: DType, where: str) -> TensorRef:
    offset, shape, strides = args[1:4]
    if type(offset) is not int or not 0 <= offset < MAX_ELEMENTS or not _is_shape(shape) or not _is_shape(strides):
        raise _malformed(cls, where)
    if len(shape) != len(strides):
        raise _malformed(cls, where)
    return tensor_ref(args[0], dtype, offset, tuple(shape), tuple(strides), len(args) > 4 and args[4] is True, where)


def _is_shape(value: Value) -> TypeGuard[Shape]:
    if not isinstance(value, (tuple, list)) or len(value) > MAX_AXES:
        return False
    for n in value:  # noqa: SIM110  (a loop is twice as fast as all(), and this runs for every tensor)
        if type(n) is not int or not 0 <= n < MAX_ELEMENTS:
            return False
    return True


def _attrs(state: Args) -> Value:
    return state[0] if state and state[0] else None


def _malformed(cls: Global, where: str) -> CorruptError:
    return CorruptError(f"the pickle gives impossible arguments to {cls}", where=where)
