"""Values -> a pickle of protocol 2, as `torch.save` writes them, or of protocol 4.

A value that is not of pickle's own types is first lowered to a `Record`, the
call that constructs it, so that there is one way to write an object. Objects
that occur twice are written once, even if they contain themselves.
"""

import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ckpt_formats.containers.torchfile import pickle_reader as op
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.values import Global, Record, Size, StdDict, Value, kind_of, opaque

_BATCH = 1000  # number of items between two marks, as in CPython's pickler
_TUPLES = {1: op.TUPLE1, 2: op.TUPLE2, 3: op.TUPLE3}

Lower = Callable[[Value], "Record | Persistent | None"]


class Persistent(tuple[Value, ...]):
    """A reference to something outside of the pickle, such as a storage."""

    __slots__ = ()


class _Code(bytes):
    """Opcodes to write as they are, on the stack of values to write."""


class _Memoize:
    """The point at which an object is complete on the reader's stack, so that it can get a memo index."""

    __slots__ = ("then", "value")

    def __init__(self, value: Value, then: list[Any]) -> None:
        self.value, self.then = value, then


def emit(root: Value, lower: Lower | None = None, protocol: Literal[2, 4] = 2) -> bytes:
    """The pickle of a value. Protocol 4 uses the same opcodes as CPython, so that record forms match it.

    `lower` returns what to write for values that are not listed in
    `ckpt_formats.core.values`, such as tensors, and None for other values.
    Raises `Unsupported` for values that cannot be written.
    """
    return _Emitter(lower, protocol).run(root)


class _Emitter:
    def __init__(self, lower: Lower | None, protocol: int) -> None:
        self._lower = lower
        self._memoizes = protocol >= 4
        self._out = bytearray()
        # Values are stored with their index: an id is only unique while its object lives.
        self._value_indices: dict[int, tuple[int, Value]] = {}
        self._name_indices: dict[str | Global, int] = {}
        self._count = 0
        self._in_progress: dict[int, int] = {}
        self._protocol = protocol
        self._stack: list[Any] = []

    def run(self, root: Value) -> bytes:
        # An explicit stack, not recursion: trees may be deeper than Python's stack.
        stack = self._stack = [root]
        while stack:
            value = stack.pop()
            kind = type(value)
            write = _WRITERS.get(kind)
            if write is not None:
                write(self, value)
            else:
                self._object(value, self._lowered(value))
        return bytes((op.PROTO, self._protocol)) + bytes(self._out) + bytes((op.STOP,))

    def next(self, *items: Any) -> None:
        """Write these items next, before all others."""
        self._stack.extend(reversed(items))

    def write_code(self, code: bytes) -> None:
        self._out += code

    def write_none(self, value: None) -> None:
        self._out.append(op.NONE)

    def write_bool(self, value: bool) -> None:
        self._out.append(op.NEWTRUE if value else op.NEWFALSE)

    def write_int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += bytes((op.BININT1, value))
        elif 0 <= value < 1 << 16:
            self._out += struct.pack("<BH", op.BININT2, value)
        elif -1 << 31 <= value < 1 << 31:
            self._out += struct.pack("<Bi", op.BININT, value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > op.MAX_INT_BYTES:
                raise Unsupported(f"an integer of {len(data)} bytes cannot be written")
            head = bytes((op.LONG1, len(data))) if len(data) < 256 else struct.pack("<Bi", op.LONG4, len(data))
            self._out += head + data

    def write_float(self, value: float) -> None:
        self._out += struct.pack(">Bd", op.BINFLOAT, value)

    def write_str(self, value: str) -> None:
        if not self._emit_name_if_known(value):
            data = value.encode("utf-8", "surrogatepass")
            short = self._memoizes and len(data) < 256
            self._out += (
                bytes((op.SHORT_BINUNICODE, len(data))) if short else struct.pack("<BI", op.BINUNICODE, len(data))
            )
            self._out += data
            self._memoize_name(value)

    def write_name(self, value: Global) -> None:
        if self._emit_name_if_known(value):
            return
        if self._memoizes:
            self.write_str(value.module)
            self.write_str(value.name)
            self._out.append(op.STACK_GLOBAL)
            self._memoize_name(value)
            return
        outer, _, inner = value.name.rpartition(".")
        if outer:  # protocol 2 cannot name a nested class: it is an attribute of the outer one
            self._write_and_memoize(value, Record(_GETATTR, (Global(value.module, outer), inner)))
            return
        try:
            self._out += bytes((op.GLOBAL,)) + f"{value.module}\n{value.name}\n".encode()
        except UnicodeEncodeError:
            raise Unsupported(f"the name {value} cannot be written") from None
        self._memoize_name(value)

    def write_list(self, value: list[Value]) -> None:
        if not self._emit_get_if_known(value):
            self._out.append(op.EMPTY_LIST)
            self._emit_put(value)
            self._items(value)

    def write_dict(self, value: dict[Value, Value]) -> None:
        if not self._emit_get_if_known(value):
            self._out.append(op.EMPTY_DICT)
            self._emit_put(value)
            self._pairs(list(value.items()))

    def write_tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self._out.append(op.EMPTY_TUPLE)
        elif not self._emit_get_if_known(value):
            # Tuples of integers get no memo index: they are equal by value, and most tuples are shapes and strides.
            only_integers = not self._memoizes and all(type(part) is int for part in value)
            memoize = () if only_integers else (_Memoize(value, []),)
            if short := _TUPLES.get(len(value)):
                self.next(*value, _Code((short,)), *memoize)
            else:
                self._out.append(op.MARK)
                self.next(*value, _Code((op.TUPLE,)), *memoize)

    def write_record(self, value: Record) -> None:
        self._object(value, value)

    def write_persistent(self, value: Persistent) -> None:
        self.next(tuple(value), _Code((op.BINPERSID,)))

    def write_memoized(self, mark: _Memoize) -> None:
        value = mark.value
        self._in_progress[id(value)] = self._in_progress.get(id(value), 0) - 1
        if id(value) in self._value_indices:
            # One of its own parts refers to it, so that part has written it already.
            self._out.append(op.POP)
            self._emit_get_if_known(value)
            return
        self._emit_put(value)
        self.next(*mark.then)

    def _object(self, value: Value, record: "Record | Persistent") -> None:
        """Write the call that constructs an object, then its items, mapping and state."""
        if self._emit_get_if_known(value):
            return
        if isinstance(record, Persistent):
            self.next(record, _Memoize(value, []))
            return
        within = self._in_progress.get(id(value), 0)
        if within > 2:
            raise Unsupported(f"an object of class {record.cls} is an argument of its own constructor")
        self._in_progress[id(value)] = within + 1
        then: list[Any] = []
        if record.items:
            then.append(_Deferred(self._items, record.items))
        if record.mapping:
            then.append(_Deferred(self._pairs, record.mapping))
        if record.state is not None:
            then += [record.state, _Code((op.BUILD,))]
        if record.kwargs:
            if not record.new:
                raise Unsupported(f"a call of {record.cls} with keywords cannot be written")
            self._protocol = 4
            call = [record.args, record.kwargs, _Code((op.NEWOBJ_EX,))]
        else:
            call = [record.args, _Code((op.NEWOBJ if record.new else op.REDUCE,))]
        self.next(record.cls, *call, _Memoize(value, then))

    def _lowered(self, value: Value) -> "Record | Persistent":
        if self._lower is not None and (lowered := self._lower(value)) is not None:
            return lowered
        lower = _LOWERED.get(type(value))
        if lower is not None:
            return lower(value)
        if isinstance(value, np.generic):
            return _scalar(value)
        if isinstance(value, np.dtype):
            return _dtype(value)
        raise Unsupported(f"{kind_of(value)} cannot be written")

    def _items(self, items: list[Value]) -> None:
        self._batches(items, _BATCH, op.APPEND, op.APPENDS)

    def _pairs(self, pairs: list[tuple[Value, Value]]) -> None:
        self._batches([part for pair in pairs for part in pair], 2 * _BATCH, op.SETITEM, op.SETITEMS)

    def _batches(self, parts: list[Value], max_count: int, single: int, several: int) -> None:
        """Write the parts of a container in batches. The last batch is pushed on the stack first."""
        for start in reversed(range(0, len(parts), max_count)):
            batch = parts[start : start + max_count]
            if len(batch) <= max_count // _BATCH:
                self.next(*batch, _Code((single,)))
            else:
                self.next(_Code((op.MARK,)), *batch, _Code((several,)))

    def _emit_put(self, value: Value) -> None:
        self._value_indices[id(value)] = (self._next_index(), value)

    def _emit_get_if_known(self, value: Value) -> bool:
        known = self._value_indices.get(id(value))
        if known is not None:
            self._emit_get(known[0])
        return known is not None

    def _memoize_name(self, value: "str | Global") -> None:
        self._name_indices[value] = self._next_index()

    def _emit_name_if_known(self, value: "str | Global") -> bool:
        index = self._name_indices.get(value)
        if index is not None:
            self._emit_get(index)
        return index is not None

    def _write_and_memoize(self, value: Global, call: Record) -> None:
        self.next(call, _Deferred(self._memoize_name, value))

    def _next_index(self) -> int:
        index = self._count
        self._count += 1
        if self._memoizes:
            self._out.append(op.MEMOIZE)
        elif index < 256:
            self._out += bytes((op.BINPUT, index))
        else:
            self._out += struct.pack("<BI", op.LONG_BINPUT, index)
        return index

    def _emit_get(self, index: int) -> None:
        if index < 256:
            self._out += bytes((op.BINGET, index))
        else:
            self._out += struct.pack("<BI", op.LONG_BINGET, index)


class _Deferred:
    """A call of the emitter, on the stack of values to write."""

    __slots__ = ("argument", "step")

    def __init__(self, step: Callable[[Any], None], argument: Any) -> None:
        self.step, self.argument = step, argument


_GETATTR = Global("__builtin__", "getattr")


def _bytes(value: bytes) -> Record:
    # torch.load(weights_only=True) does not allow `bytes()`, which CPython writes for empty bytes.
    return Record(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))


def _std_dict(value: StdDict) -> Record:
    state = dict(value.attrs) or None
    if value.cls.name == "Counter":
        return Record(value.cls, (dict(value),), state=state)
    args = (value.factory,) if value.cls.name == "defaultdict" else ()
    return Record(value.cls, args, mapping=list(value.items()), state=state)


def _array(value: np.ndarray[Any, Any]) -> Record:
    if isinstance(record := opaque(value), Record):
        return record
    if value.dtype.hasobject or value.dtype.names is not None:
        raise Unsupported("NumPy arrays of Python objects or with named fields cannot be written")
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    return Record(
        Global("numpy.core.multiarray", "_reconstruct"),  # NumPy 2 still has the old name, NumPy 1 has only that
        (Global("numpy", "ndarray"), (0,), b"b"),
        state=(1, value.shape, _dtype(value.dtype), fortran, value.tobytes("F" if fortran else "C")),
    )


def _scalar(value: "np.generic[Any]") -> Record:
    return Record(Global("numpy.core.multiarray", "scalar"), (_dtype(value.dtype), value.tobytes()))


def _dtype(value: "np.dtype[Any]") -> Record:
    if value.hasobject or value.names is not None:
        raise Unsupported(f"the NumPy type {value} cannot be written")
    _, (code, *flags), state = value.__reduce__()  # type: ignore[str-unpack]
    if not isinstance(code, str):
        if value.name not in DTYPES:
            raise Unsupported(f"the NumPy type {value} cannot be written")
        code = Global("ml_dtypes", value.name)
    return Record(Global("numpy", "dtype"), (code, *flags), state=state)


_LOWERED: dict[type, Callable[[Any], Record]] = {
    bytes: _bytes,
    bytearray: lambda value: Record(Global("__builtin__", "bytearray"), (bytes(value),)),
    complex: lambda value: Record(Global("__builtin__", "complex"), (value.real, value.imag)),
    set: lambda value: Record(Global("__builtin__", "set"), (list(value),)),
    frozenset: lambda value: Record(Global("__builtin__", "frozenset"), (list(value),)),
    Size: lambda value: Record(Global("torch", "Size"), (tuple(value),)),
    StdDict: _std_dict,
    np.ndarray: _array,
}

_WRITERS: dict[type, Callable[[_Emitter, Any], None]] = {
    type(None): _Emitter.write_none,
    bool: _Emitter.write_bool,
    int: _Emitter.write_int,
    float: _Emitter.write_float,
    str: _Emitter.write_str,
    Global: _Emitter.write_name,
    list: _Emitter.write_list,
    dict: _Emitter.write_dict,
    tuple: _Emitter.write_tuple,
    Record: _Emitter.write_record,
    Persistent: _Emitter.write_persistent,
    _Code: _Emitter.write_code,
    _Memoize: _Emitter.write_memoized,
    _Deferred: lambda emitter, later: later.step(later.argument),
}
