"""Plain objects that a pickle may contain by the hundred thousand, each matched by one regular expression.

A pickle writes an object with about twenty opcodes, and writes all objects of
a class with the same sequence. If the caller knows the class, one regular
expression matches the sequence, and the object becomes a flat tuple instead
of a `Record`. Any other sequence is read by the interpreter, opcode by opcode:
a form makes reading faster, but does not change the result.

The opcodes are those of protocols 4 and 5, in which `pickle` writes objects:

    GET class, EMPTY_TUPLE | NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, (GET name, value)*, SETITEMS, BUILD

A form is tried at the position of the bar. Each opcode has its own first byte,
so a match is unambiguous. An expression cannot count the length of a text;
it is checked afterwards.
"""

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Literal, TypeAlias

from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.values import Global, Record, Size, Value

_Groups = tuple[bytes | None, ...]
_Decoder = Callable[[_Groups, int, list[Value], list[Value]], Value]

_INT = rb"K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_GET = rb"h.|j.{4}"
_PATTERNS: dict[str, bytes] = {
    # A value, or a reference to an earlier one.
    "text": rb"(?:\x8c(.)(.*?)\x94|(%s))" % _GET,
    "int": rb"(%s|N)" % _INT,
    # GET torch.Size, a tuple of the lengths, a tuple of this tuple, REDUCE.
    "size": rb"(?:(%s)((?:\((?:%s){4,}t|(?:%s){1,3}[\x85-\x87])\x94|\))\x85\x94R\x94|(%s))" % (_GET, _INT, _INT, _GET),
}
_GROUPS: dict[str, int] = {"text": 3, "int": 1, "size": 3}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_BYTE, _SHORT, _LONG = 0x4B, 0x4D, 0x8A
_BINGET = 0x68
_MAX_TEXT = 64
_INT4 = 0x4A
_i4 = struct.Struct("<i").unpack_from
_u4 = struct.Struct("<I").unpack_from
_WIDTHS = {_BYTE: 1, _SHORT: 2, 0x4A: 4}
_SIZE = Global("torch", "Size")


class SkippedMemo:
    """Stands in the memo for a part of a compact record. No pickler refers to these parts."""


SKIPPED: Final = SkippedMemo()


class NeedsPlainRead(Exception):
    """A pickle refers to a part of a compact record or of a tensor, or numbers records: read it opcode by opcode."""


class NumberedMemo(list[Value]):
    """A memo with consecutive indices, as MEMOIZE assigns them: a tenth of the size of a dict."""

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NeedsPlainRead


class CompactRecord(tuple[Value, ...]):
    """An object of a form: the name of its class, then the values of its fields. It is flat, so it can be a key."""

    __slots__ = ()


@dataclass(frozen=True)
class StateForm:
    """A class whose objects have as their state a tuple of constants, names and calls that were read before.

    They become `Record`s.
    """

    module: str
    name: str


Kind: TypeAlias = "Literal['text', 'int', 'size'] | StateForm | RecordForm"
"""What a field holds. A `RecordForm`: a list with one object of this form, which becomes a tuple."""


@dataclass(frozen=True)
class RecordForm:
    """A class whose objects have these attributes, in this order. The `last` is None for an object without it."""

    module: str
    name: str
    fields: tuple[tuple[str, Kind], ...]
    last: tuple[str, Kind] | None = None
    alike: bool = False
    """Many objects have the same opcodes. They become one object."""

    @property
    def all_fields(self) -> tuple[tuple[str, Kind], ...]:
        """All fields, including `last`."""
        return self.fields if self.last is None else (*self.fields, self.last)


class FormMatcher:
    """Matches the objects of one form in one pickle."""

    def __init__(self, form: RecordForm) -> None:
        self._form = form
        self._match = re.compile(_pattern(form), re.DOTALL).match
        self._known_names: set[tuple[bytes | None, ...]] = set()
        self._texts: dict[bytes, str] = {}
        self._sizes: dict[bytes, Size] = {}
        self._states: dict[bytes, tuple[Value, ...]] = {}
        self._known: dict[bytes, tuple[CompactRecord, list[Value]]] = {}
        """By the opcodes of objects of an `alike` form: the object, and what it adds to the memo."""
        self._expected: list[tuple[int, Value, bool]] = []
        """Groups that must refer to a name or a class, the name, and whether the group may be absent."""
        self._steps, _ = self._steps_of(form, 0)
        self._names = itemgetter(*(at for at, _, _ in self._expected))

    def _steps_of(self, form: RecordForm, at: int) -> tuple[tuple[tuple[_Decoder, int], ...], int]:
        """Decoders of the fields, each with its first group; and the number of the group after the form's own."""
        decode: dict[str, _Decoder] = {"text": self._text, "int": self._int, "size": self._size}
        steps: list[tuple[_Decoder, int]] = []
        for name, kind in form.all_fields:
            self._expected.append((at, name, form.last is not None and name == form.last[0]))
            at += 1
            if isinstance(kind, str):
                if kind == "size":
                    self._expected.append((at, _SIZE, True))
                steps.append((decode[kind], at))
                at += _GROUPS[kind]
                continue
            self._expected.append((at, Global(kind.module, kind.name), False))
            if isinstance(kind, StateForm):
                steps.append((self._state, at))
                at += 2
            else:
                inner, after = self._steps_of(kind, at + 1)
                steps.append((_list_of_one(kind, inner), at))
                at = after
        return tuple(steps), at

    def match(self, data: bytes, at: int, memo: list[Value]) -> tuple[CompactRecord, int] | None:
        """The object whose opcodes begin at `at`, and the position after them; None if they do not match.

        Appends the parts of the object to the memo.
        """
        match = self._match(data, at)
        if match is None:
            return None
        if self._form.alike and (known := self._known.get(match.group())) is not None:
            memo += known[1]
            return known[0], match.end()
        groups = match.groups()
        names = self._names(groups)
        if names not in self._known_names:
            if not self._has_field_names(names, memo):
                return None
            self._known_names.add(names)
        parts: list[Value] = [None, SKIPPED]
        try:
            record = CompactRecord([self._form.name, *[decode(groups, i, parts, memo) for decode, i in self._steps]])
        except (_NotThisForm, IndexError, UnicodeDecodeError):
            return None
        parts[0] = record
        memo += parts
        if self._form.alike:
            self._known[match.group()] = record, parts
        return record, match.end()

    def _has_field_names(self, names: Sequence[bytes | None], memo: list[Value]) -> bool:
        """Whether these references mean the names of the fields, and their classes."""
        for get, (_, expected, optional) in zip(names, self._expected, strict=True):
            if get is None:
                # An absent field, or a size that is itself a reference.
                if not optional:
                    return False
            elif _index(get) >= len(memo) or not _is(memo[_index(get)], expected):
                return False
        return True

    # Decoders of one field each; the groups of the field begin at `i`.

    def _text(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        text = groups[i + 1]
        if text is None:
            get = groups[i + 2]
            if get is None:
                return None
            value = memo[get[1] if len(get) == 2 else _u4(get, 1)[0]]
            if type(value) is not str:
                raise _NotThisForm
            return value
        length = groups[i]
        if length is None or len(text) != length[0]:
            raise _NotThisForm
        decoded = self._texts.get(text)
        if decoded is None:
            decoded = self._texts[text] = text.decode("utf-8", "surrogatepass")
        parts.append(decoded)
        return decoded

    def _int(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        data = groups[i]
        if data is None or data == b"N":
            return None
        kind = data[0]
        if kind == _BYTE:
            return data[1]
        if kind == _INT4:
            return _i4(data, 1)[0]
        return int.from_bytes(data[2:] if kind == _LONG else data[1:], "little", signed=kind != _SHORT)

    def _size(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        opcodes = groups[i + 1]
        if opcodes is None:
            get = groups[i + 2]
            return None if get is None else _of_type(memo[_index(get)], Size)
        size = self._sizes.get(opcodes)
        if size is None:
            size = self._sizes[opcodes] = _size(opcodes)
        parts += (SKIPPED, SKIPPED, size) if size else (SKIPPED, size)
        return size

    def _state(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        get, opcodes = groups[i : i + 2]
        if get is None or opcodes is None:
            raise _NotThisForm
        state = self._states.get(opcodes)
        if state is None:
            state = self._states[opcodes] = _earlier_values(opcodes, memo)
        parts += (SKIPPED, SKIPPED)
        return Record(memo[_index(get)], state=state, new=True)


class _NotThisForm(Exception):
    """The opcodes look like those of the form, but are not."""


def _list_of_one(form: RecordForm, steps: Sequence[tuple[_Decoder, int]]) -> _Decoder:
    def decode(groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        parts += (SKIPPED, SKIPPED, SKIPPED)  # the list, the object, the dict of its attributes
        return (CompactRecord([form.name, *[decode(groups, at, parts, memo) for decode, at in steps]]),)

    return decode


def _pattern(form: RecordForm) -> bytes:
    fields = b"".join(rb"(%s)%s" % (_GET, _pattern_of(kind)) for _, kind in form.fields)
    last = b"" if form.last is None else rb"(?:(%s)%s)?" % (_GET, _pattern_of(form.last[1]))
    return rb"\x81\x94}\x94\(" + fields + last + b"ub"


def _pattern_of(kind: Kind) -> bytes:
    if isinstance(kind, str):
        return _PATTERNS[kind]
    if isinstance(kind, StateForm):
        return rb"(%s)\)\x81\x94\(((?:%s|[N\x88\x89]){4,32})t\x94b" % (_GET, _GET)
    return rb"\]\x94(%s)\)%sa" % (_GET, _pattern(kind))


def _earlier_values(opcodes: bytes, memo: list[Value]) -> tuple[Value, ...]:
    """The values that these opcodes push, each a reference or a constant."""
    values: list[Value] = []
    at = 0
    while at < len(opcodes):
        kind = opcodes[at]
        if kind in _CONSTANTS:
            values.append(_CONSTANTS[kind])
            at += 1
        else:
            width = 2 if kind == _BINGET else 5
            values.append(memo[_index(opcodes[at : at + width])])
            at += width
    if not all(map(_is_simple, values)):
        raise _NotThisForm
    return tuple(values)


def _is_simple(value: Value) -> bool:
    """Whether a value is a constant, a name, or a call of one with a text or number: it hides nothing."""
    if type(value) is Record:
        small = all(type(one) is int or (type(one) is str and len(one) < _MAX_TEXT) for one in value.args[:3])
        return (
            small and len(value.args) < 3 and not (value.kwargs or value.items or value.mapping) and value.state is None
        )
    return value is None or type(value) in (bool, Global)


def _size(opcodes: bytes) -> Size:
    """The lengths in `(ints t MEMOIZE`, `ints TUPLE1..3 MEMOIZE` or `)`."""
    at, lengths = int(opcodes[:1] == b"("), []
    while (kind := opcodes[at]) in _WIDTHS or kind == _LONG:
        width = _WIDTHS[kind] if kind != _LONG else opcodes[at + 1]
        start = at + (2 if kind == _LONG else 1)
        lengths.append(int.from_bytes(opcodes[start : start + width], "little", signed=kind != _SHORT and width > 1))
        at = start + width
    # The interpreter refuses these, and states why.
    if len(lengths) != _TUPLES.get(kind, len(lengths)) or len(lengths) > MAX_AXES:
        raise _NotThisForm
    if not all(0 <= length < MAX_ELEMENTS for length in lengths):
        raise _NotThisForm
    return Size(lengths)


def _index(get: bytes) -> int:
    return int.from_bytes(get[1:], "little")


def _is(value: Value, expected: Value) -> bool:
    """Whether a value is this name or class. (Arrays cannot be compared with `==` alone.)"""
    return type(value) is type(expected) and bool(value == expected)


def _of_type(value: Value, kind: type) -> Value:
    if type(value) is not kind:
        raise _NotThisForm
    return value
