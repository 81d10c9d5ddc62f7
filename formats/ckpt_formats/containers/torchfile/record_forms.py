"""Plain objects that a pickle has by the hundred thousand, recognised as a whole.

A pickle spells an object out in some twenty opcodes, and spells every object
of a class in the same way. Where the caller knows the class, one regular
expression takes them all at once, and the object becomes a flat tuple instead
of a `Record`. Whatever is spelled in another way is left to the interpreter,
which reads it opcode by opcode: a form makes reading faster, never different.

The opcodes are those of protocols 4 and 5, in which `pickle` writes objects:

    GET class, EMPTY_TUPLE | NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, (GET name, value)*, SETITEMS, BUILD

A form is tried where the bar is. Each opcode has its own first byte, so there
is one way to read what matches; the length of a text, which an expression
cannot count, is checked afterwards.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal

from ckpt_formats.containers.torchfile.storages import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.values import Global, Size, Value

Kind = Literal["text", "int", "size"]
_Groups = tuple[bytes | None, ...]
_Take = Callable[[_Groups, int, list[Value], list[Value]], Value]

_INT = rb"K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_GET = rb"h.|j.{4}"
_PATTERNS: dict[Kind, bytes] = {
    # A value, or a reference to one that is known already.
    "text": rb"(?:\x8c(.)(.*?)\x94|(%s))" % _GET,
    "int": rb"(%s|N)" % _INT,
    # GET torch.Size, a tuple of the lengths, a tuple of this tuple, REDUCE.
    "size": rb"(?:(%s)((?:\((?:%s){4,}t|(?:%s){1,3}[\x85-\x87])\x94|\))\x85\x94R\x94|(%s))" % (_GET, _INT, _INT, _GET),
}
_GROUPS: dict[Kind, int] = {"text": 3, "int": 1, "size": 3}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_BYTE, _SHORT, _LONG = 0x4B, 0x4D, 0x8A
_WIDTHS = {_BYTE: 1, _SHORT: 2, 0x4A: 4}
_SIZE = Global("torch", "Size")


class SkippedMemo:
    """Stands in the memo for a part of a formed object. No pickler refers to these."""


SKIPPED: Final = SkippedMemo()


class CompactRecord(tuple[Value, ...]):
    """An object as its form has it: the name of its class, then the values of its fields. Flat, so it can be a key."""

    __slots__ = ()


@dataclass(frozen=True)
class RecordForm:
    """A class whose objects have these attributes, in this order. The `last` may be absent; then it is None."""

    module: str
    name: str
    fields: tuple[tuple[str, Kind], ...]
    last: tuple[str, Kind] | None = None

    @property
    def all_fields(self) -> tuple[tuple[str, Kind], ...]:
        return self.fields if self.last is None else (*self.fields, self.last)


class FormMatcher:
    """Recognises the objects of one form in one pickle."""

    def __init__(self, form: RecordForm) -> None:
        self._form = form
        self._match = re.compile(_pattern(form), re.DOTALL).match
        self._known: set[tuple[bytes | None, ...]] = set()
        self._texts: dict[bytes, str] = {}
        self._sizes: dict[bytes, Size] = {}
        take: dict[Kind, _Take] = {"text": self._text, "int": self._int, "size": self._size}
        names, steps, at = [], [], 0
        for _, kind in form.all_fields:
            names += [at, at + 1] if kind == "size" else [at]
            steps.append((take[kind], at + 1))
            at += 1 + _GROUPS[kind]
        self._names, self._steps = itemgetter(*names), tuple(steps)

    def match(self, data: bytes, at: int, memo: list[Value]) -> tuple[CompactRecord, int] | None:
        """The object spelled out from `at` on, and where that ends; None if there is none.

        The parts of the object are in the memo then.
        """
        found = self._match(data, at)
        if found is None:
            return None
        groups = found.groups()
        names = self._names(groups)
        if names not in self._known:
            if not self._named(names, memo):
                return None
            self._known.add(names)
        parts: list[Value] = [None, SKIPPED]
        try:
            made = CompactRecord([self._form.name, *[take(groups, i, parts, memo) for take, i in self._steps]])
        except (_NotThisForm, IndexError, UnicodeDecodeError):
            return None
        parts[0] = made
        memo += parts
        return made, found.end()

    def _named(self, names: Sequence[bytes | None], memo: list[Value]) -> bool:
        """Do these references mean the names of the fields, and `torch.Size`?"""
        wanted: list[Value] = []
        for name, kind in self._form.all_fields:
            wanted += (name, _SIZE) if kind == "size" else (name,)
        last = self._form.last
        optional = () if last is None else (last[0],)
        for get, want in zip(names, wanted, strict=True):
            if get is None:
                # An absent field, or a size that is itself a reference.
                if want is not _SIZE and want not in optional:
                    return False
            elif _index(get) >= len(memo) or memo[_index(get)] != want:
                return False
        return True

    # What each kind of field is made of: its groups begin at `i`.

    def _text(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        length, text, get = groups[i : i + 3]
        if text is None or length is None:
            return None if get is None else _of_type(memo[_index(get)], str)
        if len(text) != length[0]:
            raise _NotThisForm
        made = self._texts.get(text)
        if made is None:
            made = self._texts[text] = text.decode("utf-8", "surrogatepass")
        parts.append(made)
        return made

    def _int(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        data = groups[i]
        if data is None or data == b"N":
            return None
        kind = data[0]
        if kind == _BYTE:
            return data[1]
        return int.from_bytes(data[2:] if kind == _LONG else data[1:], "little", signed=kind != _SHORT)

    def _size(self, groups: _Groups, i: int, parts: list[Value], memo: list[Value]) -> Value:
        spelled = groups[i + 1]
        if spelled is None:
            get = groups[i + 2]
            return None if get is None else _of_type(memo[_index(get)], Size)
        made = self._sizes.get(spelled)
        if made is None:
            made = self._sizes[spelled] = _size(spelled)
        parts += (SKIPPED, SKIPPED, made) if made else (SKIPPED, made)
        return made


class _NotThisForm(Exception):
    """It only looks like an object of the form."""


def _pattern(form: RecordForm) -> bytes:
    fields = b"".join(rb"(%s)%s" % (_GET, _PATTERNS[kind]) for _, kind in form.fields)
    last = b"" if form.last is None else rb"(?:(%s)%s)?" % (_GET, _PATTERNS[form.last[1]])
    return rb"\x81\x94}\x94\(" + fields + last + b"ub"


def _size(spelled: bytes) -> Size:
    """The lengths in `(ints t MEMOIZE`, `ints TUPLE1..3 MEMOIZE` or `)`."""
    at, lengths = int(spelled[:1] == b"("), []
    while (kind := spelled[at]) in _WIDTHS or kind == _LONG:
        width = _WIDTHS[kind] if kind != _LONG else spelled[at + 1]
        start = at + (2 if kind == _LONG else 1)
        lengths.append(int.from_bytes(spelled[start : start + width], "little", signed=kind != _SHORT and width > 1))
        at = start + width
    # The interpreter refuses these; it shall say why.
    if len(lengths) != _TUPLES.get(kind, len(lengths)) or len(lengths) > MAX_AXES:
        raise _NotThisForm
    if not all(0 <= length < MAX_ELEMENTS for length in lengths):
        raise _NotThisForm
    return Size(lengths)


def _index(get: bytes) -> int:
    return int.from_bytes(get[1:], "little")


def _of_type(value: Value, kind: type) -> Value:
    if type(value) is not kind:
        raise _NotThisForm
    return value
