"""Values -> a pickle of protocol 2, as `torch.save` writes them, or of protocol 4.

A value that is not of pickle's own types is first lowered to a `Record`, the
call that constructs it, so that there is one way to write an object. Objects
that occur twice are written once, even if they contain themselves.
"""

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ckpt_formats.containers.torchfile import opcodes as op
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.values import Global, Record, Size, StdDict, Value, kind_of, opaque

_BATCH = 1000  # number of items between two marks, as in CPython's pickler
_TUPLES = {1: op.TUPLE1, 2: op.TUPLE2, 3: op.TUPLE3}

Lower = Callable[[Value], "Record | Persistent | None"]


class Persistent(tuple[Value, ...]):
    """A reference to something outside of the pickle, such as a storage."""

    __slots__ = ()


class Gap:
    """A place in a template."""

    __slots__ = ()


class Template:
    """A value that is written often, each time with other values in its gaps.

    Its opcodes are the same each time, so that most of them are computed once.
    """

    __slots__ = ("build",)

    def __init__(self, build: Callable[..., Value]) -> None:
        """`build` constructs the value, given the value of each gap. The gaps are written in the order of arguments."""
        self.build = build

    def fill(self, *values: Value) -> "Filled":
        """The value with these values in its gaps."""
        return Filled(self, values)


class Filled:
    """A template and the values of its gaps."""

    __slots__ = ("template", "values")

    def __init__(self, template: Template, values: tuple[Value, ...]) -> None:
        self.template, self.values = template, values


class _Code(bytes):
    """Opcodes to write as they are, on the stack of values to write."""


class _Fragment:
    """Opcodes of a template, and how many objects they give a memo index."""

    __slots__ = ("code", "memoized")

    def __init__(self, code: bytes, memoized: int) -> None:
        self.code, self.memoized = code, memoized


class _Memoize:
    """The point at which an object is complete on the reader's stack, so that it can get a memo index."""

    __slots__ = ("then", "value")

    def __init__(self, value: Value, then: list[Any]) -> None:
        self.value, self.then = value, then


def emit(root: Value, lower: Lower | None = None, protocol: Literal[2, 4] = 2) -> bytes:
    """The pickle of a value. Protocol 4 uses the same opcodes as CPython, so that record forms match it.

    `lower` returns what to write for values that are not listed in
    `ckpt_formats.core.values`, such as tensors, and None for other values.
    Raises `UnsupportedError` for values that cannot be written.
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
        # In protocol 4 the opcodes do not depend on the memo's next index: what is written often is computed once.
        self._sizes: dict[Size, bytes] = {}
        self._templates: dict[Template, list[_Fragment] | None] = {}
        self._gaps: list[tuple[Gap, tuple[int, int]]] = []

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
        """Write these items next, before all others: the first ones at once, as long as they have no parts.

        It is the last act of a writer, so that the order of the output is that of the items.
        """
        for i, item in enumerate(items):
            kind = type(item)
            if kind not in _WITHOUT_PARTS:
                self._stack.extend(reversed(items[i:]))
                return
            _WRITERS[kind](self, item)

    def write_code(self, code: bytes) -> None:
        self._out += code

    def write_none(self, value: None) -> None:
        self._out.append(op.NONE)

    def write_bool(self, value: bool) -> None:
        self._out.append(op.NEWTRUE if value else op.NEWFALSE)

    def write_int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += _SHORT_INTS[value]
        elif 0 <= value < 1 << 16:
            self._out += struct.pack("<BH", op.BININT2, value)
        elif -1 << 31 <= value < 1 << 31:
            self._out += struct.pack("<Bi", op.BININT, value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > op.MAX_INT_BYTES:
                raise UnsupportedError(f"an integer of {len(data)} bytes cannot be written")
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
            raise UnsupportedError(f"the name {value} cannot be written") from None
        self._memoize_name(value)

    def _is_plain(self, name: Global) -> bool:
        """Whether the name is written at once, as it has no parts."""
        return self._memoizes or "." not in name.name

    def write_list(self, value: list[Value]) -> None:
        if not self._emit_get_if_known(value):
            self._out.append(op.EMPTY_LIST)
            self._emit_put(value)
            self._items(value)

    def write_dict(self, value: dict[Value, Value]) -> None:
        if self._emit_get_if_known(value):
            return
        self._out.append(op.EMPTY_DICT)
        self._emit_put(value)
        self._pairs(list(value.items()))

    def write_tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self._out.append(op.EMPTY_TUPLE)
        elif not self._emit_get_if_known(value):
            if not _INTEGERS.issuperset(map(type, value)):
                short = _TUPLES.get(len(value))
                if not short:
                    self._out.append(op.MARK)
                self.next(*value, _Code((short or op.TUPLE,)), _Memoize(value, []))
            elif self._memoizes:
                self._integers(value)
                self._emit_put(value)
            else:
                # No memo index: they are equal by value, and most tuples are shapes and strides.
                self._integers(value)

    def write_size(self, value: Size) -> None:
        """A call of `torch.Size` with a tuple. The tuples are written once, so their memo index is of no use."""
        if not _INTEGERS.issuperset(map(type, value)):
            self._object(value, Record(_SIZE, (tuple(value),)))
            return
        if self._emit_get_if_known(value):
            return
        if value in self._sizes:
            self._out += self._sizes[value]
            self._count += 3 if value else 2
            self._value_indices[id(value)] = (self._count - 1, value)
            return
        known, start = _SIZE in self._name_indices, len(self._out)
        self.write_name(_SIZE)
        self._integers(value)
        if self._memoizes and value:
            self._next_index()
        self._out.append(op.TUPLE1)
        self._next_index()
        self._out.append(op.REDUCE)
        self._emit_put(value)
        if self._memoizes and known:
            self._sizes[value] = bytes(self._out[start:])

    def _integers(self, value: tuple[int, ...]) -> None:
        if not value:
            self._out.append(op.EMPTY_TUPLE)
            return
        short = _TUPLES.get(len(value))
        if not short:
            self._out.append(op.MARK)
        for part in value:
            self.write_int(part)
        self._out.append(short or op.TUPLE)

    def write_record(self, value: Record) -> None:
        self._object(value, value)

    def write_filled(self, value: Filled) -> None:
        template = value.template
        if template not in self._templates:
            self._templates[template] = None  # at first its names are new, and get their memo index
        elif self._memoizes:  # protocol 2 writes the index of each object, which is another one each time
            codes = self._templates[template] or self._compiled(template, len(value.values))
            self._templates[template] = codes
            self.write_fragment(codes[0])
            for i, (inner, code) in enumerate(zip(value.values, codes[1:], strict=True)):
                if type(inner) not in _WITHOUT_PARTS:
                    rest: list[Any] = [None] * (2 * (len(codes) - 1 - i))
                    rest[::2], rest[1::2] = value.values[i:], codes[i + 1 :]
                    self._stack.extend(reversed(rest))
                    return
                _WRITERS[type(inner)](self, inner)
                self._out += code.code
                self._count += code.memoized
            return
        self.next(template.build(*value.values))

    def write_fragment(self, fragment: "_Fragment") -> None:
        self._out += fragment.code
        self._count += fragment.memoized

    def write_gap(self, gap: Gap) -> None:
        self._gaps.append((gap, (len(self._out), self._count)))

    def _compiled(self, template: Template, gaps: int) -> list["_Fragment"]:
        """The opcodes before, between and after the gaps of a template."""
        draft = _Emitter(self._lower, self._protocol)
        draft._value_indices, draft._name_indices = self._value_indices.copy(), self._name_indices.copy()
        places = [Gap() for _ in range(gaps)]
        draft.run(template.build(*places))
        if [gap for gap, _ in draft._gaps] != places:
            raise ValueError("a template does not write its gaps once each, in the order of the arguments")
        marks = [(0, 0), *(mark for _, mark in draft._gaps), (len(draft._out), draft._count)]
        return [_Fragment(bytes(draft._out[a:b]), n - m) for (a, m), (b, n) in pairwise(marks)]

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
        if record.new and not record.args and not record.kwargs and self._is_plain(record.cls):
            # Without arguments it cannot be a part of its own constructor.
            self.write_name(record.cls)
            self._out += _NEW_WITHOUT_ARGUMENTS
            self._emit_put(value)
            self.next(*self._completion(record))
            return
        within = self._in_progress.get(id(value), 0)
        if within > 2:
            raise UnsupportedError(f"an object of class {record.cls} is an argument of its own constructor")
        self._in_progress[id(value)] = within + 1
        if record.kwargs:
            if not record.new:
                raise UnsupportedError(f"a call of {record.cls} with keywords cannot be written")
            self._protocol = 4
            call = [record.args, record.kwargs, _Code((op.NEWOBJ_EX,))]
        else:
            call = [record.args, _Code((op.NEWOBJ if record.new else op.REDUCE,))]
        self.next(record.cls, *call, _Memoize(value, self._completion(record)))

    def _completion(self, record: Record) -> list[Any]:
        """What is written once the object exists."""
        then: list[Any] = []
        if record.items:
            then.append(_Deferred(self._items, record.items))
        if record.mapping:
            then.append(_Deferred(self._pairs, record.mapping))
        if record.state is not None:
            then += [record.state, _BUILD]
        return then

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
        raise UnsupportedError(f"{kind_of(value)} cannot be written")

    def _items(self, items: list[Value]) -> None:
        self._batches(items, _BATCH, op.APPEND, op.APPENDS)

    def _pairs(self, pairs: list[tuple[Value, Value]]) -> None:
        self._batches([part for pair in pairs for part in pair], 2 * _BATCH, op.SETITEM, op.SETITEMS)

    def _batches(self, parts: list[Value], max_count: int, single: int, several: int) -> None:
        """Write the parts of a container in batches."""
        coded: list[Any] = []
        for start in range(0, len(parts), max_count):
            batch = parts[start : start + max_count]
            if len(batch) <= max_count // _BATCH:
                coded += [*batch, _Code((single,))]
            else:
                coded += [_MARK, *batch, _Code((several,))]
        self.next(*coded)

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
        self._out += bytes((op.BINGET, index)) if index < 256 else struct.pack("<BI", op.LONG_BINGET, index)


class _Deferred:
    """A call of the emitter, on the stack of values to write."""

    __slots__ = ("argument", "step")

    def __init__(self, step: Callable[[Any], None], argument: Any) -> None:
        self.step, self.argument = step, argument


_GETATTR, _SIZE = Global("__builtin__", "getattr"), Global("torch", "Size")
_NEW_WITHOUT_ARGUMENTS, _BUILD = bytes((op.EMPTY_TUPLE, op.NEWOBJ)), _Code((op.BUILD,))
_MARK = _Code((op.MARK,))
_INTEGERS = frozenset((int,))
_NUMPY = "numpy._core.multiarray"
"""As NumPy 2 writes it, and NumPy 1.26 reads it. Trainer and Accelerate allow `torch.load` no other name."""
_SHORT_INTS = [bytes((op.BININT1, value)) for value in range(1 << 8)]


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
        raise UnsupportedError("NumPy arrays of Python objects or with named fields cannot be written")
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    return Record(
        Global(_NUMPY, "_reconstruct"),
        (Global("numpy", "ndarray"), (0,), b"b"),
        state=(1, value.shape, _dtype(value.dtype), fortran, value.tobytes("F" if fortran else "C")),
    )


def _scalar(value: "np.generic[Any]") -> Record:
    return Record(Global(_NUMPY, "scalar"), (_dtype(value.dtype), value.tobytes()))


def _dtype(value: "np.dtype[Any]") -> Record:
    if value.hasobject or value.names is not None:
        raise UnsupportedError(f"the NumPy type {value} cannot be written")
    _, (code, *flags), state = value.__reduce__()  # type: ignore[str-unpack]
    if not isinstance(code, str):
        if value.name not in DTYPES:
            raise UnsupportedError(f"the NumPy type {value} cannot be written")
        code = Global("ml_dtypes", value.name)
    return Record(Global("numpy", "dtype"), (code, *flags), state=state)


def _in_order(values: "set[Value] | frozenset[Value]") -> list[Value]:
    """The elements of a set in an order that is the same in every process: texts are hashed otherwise in each."""
    if _INTEGERS.issuperset(map(type, values)):
        return list(values)
    return sorted(values, key=lambda one: (type(one).__name__, repr(one)))


_LOWERED: dict[type, Callable[[Any], Record]] = {
    bytes: _bytes,
    bytearray: lambda value: Record(Global("__builtin__", "bytearray"), (bytes(value),)),
    complex: lambda value: Record(Global("__builtin__", "complex"), (value.real, value.imag)),
    set: lambda value: Record(Global("__builtin__", "set"), (_in_order(value),)),
    frozenset: lambda value: Record(Global("__builtin__", "frozenset"), (_in_order(value),)),
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
    Size: _Emitter.write_size,
    Record: _Emitter.write_record,
    Persistent: _Emitter.write_persistent,
    Filled: _Emitter.write_filled,
    Gap: _Emitter.write_gap,
    _Fragment: _Emitter.write_fragment,
    _Code: _Emitter.write_code,
    _Memoize: _Emitter.write_memoized,
    _Deferred: lambda emitter, later: later.step(later.argument),
}

_WITHOUT_PARTS = frozenset((type(None), bool, int, float, str, Size, Gap, _Code, _Fragment))
