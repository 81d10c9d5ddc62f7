"""Values -> a pickle of protocol 2, as `torch.save` writes them, or of protocol 4.

What is not one of pickle's own types is first lowered to the `Record` of the
call that makes it, so that there is one way to write an object. Objects that
occur twice are written once, also if they hold themselves.
"""

import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ckpt_formats.containers.torchfile import pickle_reader as op
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.values import Global, Record, Size, StdDict, Value, kind_of, opaque

_BATCH = 1000  # as many items between two marks as CPython's pickler writes
_TUPLES = {1: op.TUPLE1, 2: op.TUPLE2, 3: op.TUPLE3}

Lower = Callable[[Value], "Record | Persistent | None"]


class Persistent(tuple[Value, ...]):
    """A reference to something outside of the pickle, such as a storage."""

    __slots__ = ()


class _Code(bytes):
    """Opcodes that are ready to be written, among values that are still to be."""


class _Memoize:
    """The point at which an object is on the stack, and may be referred to."""

    __slots__ = ("then", "value")

    def __init__(self, value: Value, then: list[Any]) -> None:
        self.value, self.then = value, then


def emit(root: Value, lower: Lower | None = None, protocol: Literal[2, 4] = 2) -> bytes:
    """The pickle of a value. Protocol 4 is spelled as CPython spells it, so that `forms` recognise it.

    `lower` says what to write for values that are not listed in
    `ckpt_formats.core.values`, such as tensors; it returns None for what it does
    not know. Raises `Unsupported` for values that cannot be written.
    """
    return _Emitter(lower, protocol).run(root)


class _Emitter:
    def __init__(self, lower: Lower | None, protocol: int) -> None:
        self._lower = lower
        self._memoizes = protocol >= 4
        self._out = bytearray()
        # Values are kept beside their index: an id is only unique while its object lives.
        self._memo: dict[int, tuple[int, Value]] = {}
        self._named: dict[str | Global, int] = {}
        self._count = 0
        self._open: dict[int, int] = {}
        self._protocol = protocol
        self._todo: list[Any] = []

    def run(self, root: Value) -> bytes:
        # A list of what is left to do, not recursion: trees may be deeper than Python's stack.
        todo = self._todo = [root]
        while todo:
            value = todo.pop()
            kind = type(value)
            write = _WRITERS.get(kind)
            if write is not None:
                write(self, value)
            else:
                self._object(value, self._lowered(value))
        return bytes((op.PROTO, self._protocol)) + bytes(self._out) + bytes((op.STOP,))

    def next(self, *items: Any) -> None:
        """Write these next, before whatever is left to do."""
        self._todo.extend(reversed(items))

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
        if not self._known(value):
            data = value.encode("utf-8", "surrogatepass")
            short = self._memoizes and len(data) < 256
            self._out += (
                bytes((op.SHORT_BINUNICODE, len(data))) if short else struct.pack("<BI", op.BINUNICODE, len(data))
            )
            self._out += data
            self._name(value)

    def write_name(self, value: Global) -> None:
        if self._known(value):
            return
        if self._memoizes:
            self.write_str(value.module)
            self.write_str(value.name)
            self._out.append(op.STACK_GLOBAL)
            self._name(value)
            return
        outer, _, inner = value.name.rpartition(".")
        if outer:  # protocol 2 cannot name a nested class, so it is taken out of the outer one
            self._named_later(value, Record(_GETATTR, (Global(value.module, outer), inner)))
            return
        try:
            self._out += bytes((op.GLOBAL,)) + f"{value.module}\n{value.name}\n".encode()
        except UnicodeEncodeError:
            raise Unsupported(f"the name {value} cannot be written") from None
        self._name(value)

    def write_list(self, value: list[Value]) -> None:
        if not self._get(value):
            self._out.append(op.EMPTY_LIST)
            self._put(value)
            self._items(value)

    def write_dict(self, value: dict[Value, Value]) -> None:
        if not self._get(value):
            self._out.append(op.EMPTY_DICT)
            self._put(value)
            self._pairs(list(value.items()))

    def write_tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self._out.append(op.EMPTY_TUPLE)
        elif not self._get(value):
            # Nobody can tell two equal tuples of numbers apart; shapes and strides are most tuples there are.
            plain = not self._memoizes and all(type(part) is int for part in value)
            made = () if plain else (_Memoize(value, []),)
            if short := _TUPLES.get(len(value)):
                self.next(*value, _Code((short,)), *made)
            else:
                self._out.append(op.MARK)
                self.next(*value, _Code((op.TUPLE,)), *made)

    def write_record(self, value: Record) -> None:
        self._object(value, value)

    def write_persistent(self, value: Persistent) -> None:
        self.next(tuple(value), _Code((op.BINPERSID,)))

    def write_made(self, made: _Memoize) -> None:
        value = made.value
        self._open[id(value)] = self._open.get(id(value), 0) - 1
        if id(value) in self._memo:
            # Its own parts referred to it, and made it while it was being made.
            self._out.append(op.POP)
            self._get(value)
            return
        self._put(value)
        self.next(*made.then)

    def _object(self, value: Value, record: "Record | Persistent") -> None:
        """Write the call that makes an object, then what is put into it."""
        if self._get(value):
            return
        if isinstance(record, Persistent):
            self.next(record, _Memoize(value, []))
            return
        within = self._open.get(id(value), 0)
        if within > 2:
            raise Unsupported(f"an object of class {record.cls} is made of itself")
        self._open[id(value)] = within + 1
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
            how = [record.args, record.kwargs, _Code((op.NEWOBJ_EX,))]
        else:
            how = [record.args, _Code((op.NEWOBJ if record.new else op.REDUCE,))]
        self.next(record.cls, *how, _Memoize(value, then))

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

    def _batches(self, parts: list[Value], most: int, single: int, several: int) -> None:
        """Write the parts of a container, as few marks deep as possible. The last batch is stacked first."""
        for start in reversed(range(0, len(parts), most)):
            batch = parts[start : start + most]
            if len(batch) <= most // _BATCH:
                self.next(*batch, _Code((single,)))
            else:
                self.next(_Code((op.MARK,)), *batch, _Code((several,)))

    def _put(self, value: Value) -> None:
        self._memo[id(value)] = (self._next_index(), value)

    def _get(self, value: Value) -> bool:
        known = self._memo.get(id(value))
        if known is not None:
            self._recall(known[0])
        return known is not None

    def _name(self, value: "str | Global") -> None:
        self._named[value] = self._next_index()

    def _known(self, value: "str | Global") -> bool:
        index = self._named.get(value)
        if index is not None:
            self._recall(index)
        return index is not None

    def _named_later(self, value: Global, how: Record) -> None:
        self.next(how, _Deferred(self._name, value))

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

    def _recall(self, index: int) -> None:
        if index < 256:
            self._out += bytes((op.BINGET, index))
        else:
            self._out += struct.pack("<BI", op.LONG_BINGET, index)


class _Deferred:
    """A step of the emitter, among values that are still to be written."""

    __slots__ = ("argument", "step")

    def __init__(self, step: Callable[[Any], None], argument: Any) -> None:
        self.step, self.argument = step, argument


_GETATTR = Global("__builtin__", "getattr")


def _bytes(value: bytes) -> Record:
    # torch.load(weights_only=True) does not know `bytes()`, which CPython writes for an empty one.
    return Record(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))


def _std_dict(value: StdDict) -> Record:
    state = dict(value.attrs) or None
    if value.cls.name == "Counter":
        return Record(value.cls, (dict(value),), state=state)
    args = (value.factory,) if value.cls.name == "defaultdict" else ()
    return Record(value.cls, args, mapping=list(value.items()), state=state)


def _array(value: np.ndarray[Any, Any]) -> Record:
    if isinstance(said := opaque(value), Record):
        return said
    if value.dtype.hasobject or value.dtype.names is not None:
        raise Unsupported("NumPy arrays of Python objects or with named fields cannot be written")
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    return Record(
        Global("numpy.core.multiarray", "_reconstruct"),  # NumPy 2 still answers to its old name, NumPy 1 to no other
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
    _Memoize: _Emitter.write_made,
    _Deferred: lambda emitter, later: later.step(later.argument),
}
