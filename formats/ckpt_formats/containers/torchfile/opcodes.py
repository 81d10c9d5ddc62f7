"""The opcodes of pickles: their numbers, as in CPython's `pickletools`, and a function for each that is rare."""

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_formats.containers.keys import KeyHashes
from ckpt_formats.containers.torchfile.builders import hashable
from ckpt_formats.containers.torchfile.record_forms import SKIPPED, NeedsPlainRead, NumberedMemo
from ckpt_formats.core.claims import MAX_PICKLE
from ckpt_formats.core.values import Value, kind_of

if TYPE_CHECKING:
    from ckpt_formats.containers.torchfile.pickle_reader import Interpreter

PROTO, STOP, FRAME = 0x80, 0x2E, 0x95
MARK, POP, POP_MARK, DUP = 0x28, 0x30, 0x31, 0x32
NONE, NEWTRUE, NEWFALSE = 0x4E, 0x88, 0x89
BININT, BININT1, BININT2, LONG1, LONG4, BINFLOAT = 0x4A, 0x4B, 0x4D, 0x8A, 0x8B, 0x47
INT, LONG, FLOAT, STRING, UNICODE, GET, PUT = 0x49, 0x4C, 0x46, 0x53, 0x56, 0x67, 0x70
BINSTRING, SHORT_BINSTRING = 0x54, 0x55
BINUNICODE, SHORT_BINUNICODE, BINUNICODE8 = 0x58, 0x8C, 0x8D
BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8 = 0x42, 0x43, 0x8E, 0x96
EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3 = 0x29, 0x74, 0x85, 0x86, 0x87
EMPTY_LIST, LIST, APPEND, APPENDS = 0x5D, 0x6C, 0x61, 0x65
EMPTY_DICT, DICT, SETITEM, SETITEMS = 0x7D, 0x64, 0x73, 0x75
EMPTY_SET, ADDITEMS, FROZENSET = 0x8F, 0x90, 0x91
BINGET, LONG_BINGET, BINPUT, LONG_BINPUT, MEMOIZE = 0x68, 0x6A, 0x71, 0x72, 0x94
GLOBAL, STACK_GLOBAL, INST, OBJ = 0x63, 0x93, 0x69, 0x6F
REDUCE, NEWOBJ, NEWOBJ_EX, BUILD = 0x52, 0x81, 0x92, 0x62
PERSID, BINPERSID = 0x50, 0x51
EXT1, EXT2, EXT4 = 0x82, 0x83, 0x84
NEXT_BUFFER, READONLY_BUFFER = 0x97, 0x98

MAX_INT_BYTES = 1024
_MAX_DECIMALS = 2467  # decimal digits of an integer of that many bytes

_i4 = struct.Struct("<i").unpack_from
_u4 = struct.Struct("<I").unpack_from
_u8 = struct.Struct("<Q").unpack_from

_DECIMAL = re.compile(rb"[+-]?[0-9]+\Z")
_FLOAT = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z|[+-]?(inf|nan)\Z")
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[\\'\"nrt])")
_ESCAPES = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _proto(m: "Interpreter") -> None:
    version = m.take(1)[0]
    if version > 5:
        raise m.corrupt(f"of protocol {version}, which does not exist")


def _frame(m: "Interpreter") -> None:
    # Frames only state how much a reader of streams must fetch.
    if _u8(m.take(8))[0] > m.size - m.pos:
        raise m.truncated()


def _pop(m: "Interpreter") -> None:
    if m.stack or not m.outer_stacks:
        m.stack.pop()
    else:
        m.pop_mark()


def _dup(m: "Interpreter") -> None:
    m.push(m.stack[-1])


def _long1(m: "Interpreter") -> None:
    m.push(int.from_bytes(m.take(m.take(1)[0]), "little", signed=True))


def _long4(m: "Interpreter") -> None:
    (length,) = _i4(m.take(4))
    if not 0 <= length <= MAX_INT_BYTES:
        raise m.unsafe(f"the pickle has an integer of {length} bytes")
    m.push(int.from_bytes(m.take(length), "little", signed=True))


def _int(m: "Interpreter") -> None:
    text = m.line()
    m.push(text == b"01" if text in (b"00", b"01") else _decimal(m, text))


def _long(m: "Interpreter") -> None:
    m.push(_decimal(m, m.line().removesuffix(b"L")))


def _decimal(m: "Interpreter", text: bytes) -> int:
    if len(text) > _MAX_DECIMALS:
        raise m.unsafe(f"the pickle has an integer of {len(text)} digits")
    if not _DECIMAL.match(text):
        raise m.corrupt("malformed: an integer with other characters than digits")
    return int(text)


def _float(m: "Interpreter") -> None:
    text = m.line()
    if not _FLOAT.match(text):
        raise m.corrupt("malformed: a number with invalid characters")
    m.push(float(text))


def _string(m: "Interpreter") -> None:
    text = m.line(MAX_PICKLE)
    if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
        raise m.corrupt("malformed: a string without quotes")
    if b"\\" in _ESCAPE.sub(b"", text):
        raise m.corrupt("malformed: a string with an unknown escape")
    m.push(_ESCAPE.sub(_unescaped, text[1:-1]).decode("latin-1"))


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes.fromhex(code[1:].decode("ascii")) if code[:1] == b"x" else _ESCAPES[code]


def _unicode(m: "Interpreter") -> None:
    m.push(m.line(MAX_PICKLE).decode("raw-unicode-escape"))


def _get(m: "Interpreter") -> None:
    if isinstance(m.memo, NumberedMemo):
        raise NeedsPlainRead
    known = m.memo[_decimal(m, m.line())]
    if known is SKIPPED:
        raise NeedsPlainRead
    m.push(known)


def _put(m: "Interpreter") -> None:
    index = _decimal(m, m.line())
    if not 0 <= index < 1 << 32:
        raise m.corrupt("malformed: an impossible memo index")
    m.memo[index] = m.stack[-1]


def _latin(m: "Interpreter", nbytes: int) -> None:
    # Strings of Python 2, which are bytes or text.
    m.push(m.take(nbytes).decode("latin-1"))


def _global(m: "Interpreter") -> None:
    module = m.line().decode("utf-8")
    m.push(m.name(module, m.line().decode("utf-8")))


def _stack_global(m: "Interpreter") -> None:
    name = m.pop()
    m.push(m.name(m.pop(), name))


def _inst(m: "Interpreter") -> None:
    module = m.line().decode("utf-8")
    cls = m.name(module, m.line().decode("utf-8"))
    args = tuple(m.pop_mark())
    m.push(m.call(cls, args, new=not args))  # Python calls a class here only if there are arguments


def _obj(m: "Interpreter") -> None:
    cls, *args = m.pop_mark()
    m.push(m.call(cls, tuple(args), new=not args))


def _newobj(m: "Interpreter") -> None:
    args = m.pop()
    m.push(m.call(m.pop(), args, new=True))


def _newobj_ex(m: "Interpreter") -> None:
    kwargs, args = m.pop(), m.pop()
    if type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
        raise m.corrupt("malformed: keyword arguments that are not a dict of names")
    m.push(m.call(m.pop(), args, new=True, kwargs=kwargs))


def _build(m: "Interpreter") -> None:
    state = m.pop()
    m.build(m.stack[-1], state)


def _append(m: "Interpreter") -> None:
    item = m.pop()
    m.extend(m.stack[-1], [item])


def _appends(m: "Interpreter") -> None:
    items = m.pop_mark()
    m.extend(m.stack[-1], items)


def _setitem(m: "Interpreter") -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: "Interpreter") -> None:
    items = m.pop_mark()
    m.set_items(m.stack[-1], items)


def _additems(m: "Interpreter") -> None:
    items = m.pop_mark()
    target = m.stack[-1]
    if type(target) is not set:
        raise m.corrupt(f"malformed: it adds elements to {kind_of(target)}")
    target.update(hashable(item, m.where, m.hashes_of(target)) for item in items)


def _frozenset(m: "Interpreter") -> None:
    hashes = KeyHashes()
    m.push(frozenset(hashable(item, m.where, hashes) for item in m.pop_mark()))


def _dict(m: "Interpreter") -> None:
    items = m.pop_mark()
    result: dict[Any, Value] = {}
    m.set_items(result, items)
    m.push(result)


def _refuse(message: str) -> "Callable[[Interpreter], None]":
    def refuse(m: "Interpreter") -> None:
        raise m.unsafe(f"the pickle {message}, which no checkpoint does")

    return refuse


RARE: "dict[int, Callable[[Interpreter], None]]" = {
    PROTO: _proto,
    FRAME: _frame,
    POP: _pop,
    POP_MARK: lambda m: m.pop_mark().clear(),
    DUP: _dup,
    LONG1: _long1,
    LONG4: _long4,
    INT: _int,
    LONG: _long,
    FLOAT: _float,
    STRING: _string,
    UNICODE: _unicode,
    GET: _get,
    PUT: _put,
    SHORT_BINSTRING: lambda m: _latin(m, m.take(1)[0]),
    BINSTRING: lambda m: _latin(m, _u4(m.take(4))[0]),
    BINUNICODE8: lambda m: m.push(str(m.take(_u8(m.take(8))[0]), "utf-8", "surrogatepass")),
    SHORT_BINBYTES: lambda m: m.push(m.take(m.take(1)[0])),
    BINBYTES: lambda m: m.push(m.take(_u4(m.take(4))[0])),
    BINBYTES8: lambda m: m.push(m.take(_u8(m.take(8))[0])),
    BYTEARRAY8: lambda m: m.push(bytearray(m.take(_u8(m.take(8))[0]))),
    LIST: lambda m: m.push(m.pop_mark()),
    DICT: _dict,
    EMPTY_SET: lambda m: m.push(set()),
    ADDITEMS: _additems,
    FROZENSET: _frozenset,
    APPEND: _append,
    APPENDS: _appends,
    SETITEM: _setitem,
    SETITEMS: _setitems,
    GLOBAL: _global,
    STACK_GLOBAL: _stack_global,
    INST: _inst,
    OBJ: _obj,
    NEWOBJ: _newobj,
    NEWOBJ_EX: _newobj_ex,
    BUILD: _build,
    PERSID: _refuse("refers to something outside of itself by a text"),
    EXT1: _refuse("uses a registered extension"),
    EXT2: _refuse("uses a registered extension"),
    EXT4: _refuse("uses a registered extension"),
    NEXT_BUFFER: _refuse("needs a buffer that is outside of it"),
    READONLY_BUFFER: _refuse("needs a buffer that is outside of it"),
}
