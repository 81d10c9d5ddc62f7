"""The pickle machine: opcodes in, inert values out.

All of protocols 0 to 5, except what only serves to run code or needs another
program's tables. Four properties make it safe, and none of them depends on
the allow list of names:

* no name is ever imported, and only the functions in `builders` are ever called;
* every length is compared with the available bytes before it is used;
* the size of a value with all shared parts written out is limited before the value is returned;
* for any bytes, the outcome is a value, `CorruptError` or `UnsafeError`.

Opcodes as in CPython's `pickletools`. The loop in `_run` handles the frequent
ones, most frequent first; the others are functions in `opcodes`.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NoReturn

import numpy as np

from ckpt_formats.containers.keys import KeyHashes
from ckpt_formats.containers.torchfile import numpy_arrays as arrays
from ckpt_formats.containers.torchfile.allow_list import NOTHING_RAN, refusal
from ckpt_formats.containers.torchfile.builders import BUILDERS, CLASS_BUILDERS, Builder, hashable
from ckpt_formats.containers.torchfile.expanded_size import check_repeated
from ckpt_formats.containers.torchfile.opcodes import (
    BINFLOAT,
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPERSID,
    BINPUT,
    BINUNICODE,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    LONG_BINGET,
    LONG_BINPUT,
    MARK,
    MEMOIZE,
    NEWFALSE,
    NEWTRUE,
    NONE,
    RARE,
    REDUCE,
    SHORT_BINUNICODE,
    STOP,
    TUPLE,
    TUPLE1,
    TUPLE2,
    TUPLE3,
)
from ckpt_formats.containers.torchfile.record_forms import (
    SKIPPED,
    FormMatcher,
    NeedsPlainRead,
    NumberedMemo,
    RecordForm,
)
from ckpt_formats.containers.torchfile.tensor_calls import FUNCTION, OPCODES, TensorCalls
from ckpt_formats.core.errors import CorruptError, UnsafeError, flaw
from ckpt_formats.core.values import Global, Record, StdDict, Value, kind_of

MAX_OPS = 1 << 26
MAX_STACK = 1 << 20
MAX_MARKS = 1 << 16
MAX_MEMO = 1 << 25
MAX_GLOBALS = 4096
_MAX_LINE = 4096
_BETWEEN_CHECKS = 4096

PAD = b"\0" * 16
"""Bytes to append to a pickle, so that no read of fixed length passes the end; no opcode is 0."""

_u2 = struct.Struct("<H").unpack_from
_i4 = struct.Struct("<i").unpack_from
_u4 = struct.Struct("<I").unpack_from
_f8 = struct.Struct(">d").unpack_from


class Truncated(CorruptError):
    """The pickle continues after the given bytes, at least to byte `needs`."""

    needs = 0


_UNREAD = object()


class Interpreter:
    """Reads the pickles of one file, one after another. Names are shared between them, memos are not.

    Objects of the classes that `forms` describe become `CompactRecord`s if their
    opcodes match the form, else `Record`s like all other objects.

    Attributes:
        pos: The byte after the last one that was read, of `size` bytes.
        stack: The values since the last mark; `outer_stacks` are those before each mark.
        memo: The values that opcodes refer to by number.
    """

    def __init__(
        self, where: str, persistent: Callable[[Value], Value] | None = None, forms: Sequence[RecordForm] = ()
    ) -> None:
        self.where = where
        self._forms = {(form.module, form.name): form for form in forms}
        self._matchers: dict[int, FormMatcher] = {}  # by id(Global)
        self._matchers_by_opcodes: dict[bytes, FormMatcher | None] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        """Every name that was read so far."""
        self._persistent = persistent
        self._tensor_calls = None if persistent is None or forms else TensorCalls(persistent, where)
        self._tensor_function: object = _UNREAD
        """The name in a call that `_tensor_calls` matches, once it was read."""
        self._builders: dict[int, Builder] = {}  # by id(Global): names are interned, and this lookup is on the hot path
        self._data = b""
        self.size = self.pos = self._ops = 0
        self.stack: list[Value] = []
        self._hashes: dict[int, tuple[Value, KeyHashes]] = {}
        """By id of a dict or set, which is kept, so that no later one has the same id."""
        self.outer_stacks: list[list[Value]] = []
        self.memo: dict[int, Value] | NumberedMemo = {}

    def load(self, padded: bytes, start: int = 0) -> tuple[Value, int]:
        """Read one pickle; return its value and where it ends.

        `padded` must end in `PAD`. Raises `Truncated`, `CorruptError` or `UnsafeError`; what is refused, and in which
        words, does not depend on tensors and alike objects being matched whole.
        """
        try:
            return self._load(padded, start)
        except NeedsPlainRead:
            if not self._match_less():
                self._forms = {}
        except Truncated:
            raise
        except (CorruptError, UnsafeError):
            if not self._match_less():
                raise
        return self.load(padded, start)

    def _match_less(self) -> bool:
        """From now on, match no tensors and no alike objects whole; False if none could have been."""
        forms = {name: form for name, form in self._forms.items() if not form.alike}
        matched = len(forms) < len(self._forms) or (self._tensor_calls is not None and self._tensor_calls.count > 0)
        self._forms, self._tensor_calls, self._tensor_function = forms, None, _UNREAD
        return matched

    def _load(self, padded: bytes, start: int) -> tuple[Value, int]:
        self._data, self.size, self.pos = padded, len(padded) - len(PAD), start
        self.stack, self.outer_stacks, self._ops = [], [], 0
        self._hashes = {}
        self.memo = NumberedMemo() if self._forms else {}
        known = ((self.globals.get(key), form) for key, form in self._forms.items())
        self._matchers = {id(name): FormMatcher(form) for name, form in known if name is not None}
        self._matchers_by_opcodes = {}
        try:
            value = self._run()
            check_repeated(value, self.where, self.pos - start)
            return value, self.pos
        except (
            IndexError,
            KeyError,
            ValueError,
            TypeError,
            AttributeError,
            OverflowError,
            struct.error,
            RecursionError,
        ) as error:
            if self.pos > self.size:
                raise self.truncated() from error
            raise self.corrupt(f"malformed: {flaw(error)}") from error
        finally:
            self._data, self.stack, self.outer_stacks, self.memo = b"", [], [], {}

    def corrupt(self, message: str) -> CorruptError:
        """An error that states the position in the pickle."""
        return CorruptError(f"the pickle is {message}, near its byte {min(self.pos, self.size)}", where=self.where)

    def truncated(self, needs: int = 0) -> Truncated:
        """An error for a pickle that continues after the given bytes."""
        error = Truncated(f"the pickle goes on beyond its last byte, {self.size}", where=self.where)
        error.needs = needs
        return error

    def unsafe(self, message: str) -> UnsafeError:
        """An error for a pickle that is refused."""
        return UnsafeError(message, where=self.where, hint=NOTHING_RAN)

    def _run(self) -> Value:
        data, size, pos = self._data, self.size, self.pos
        stack, outer_stacks, memo, builders = self.stack, self.outer_stacks, self.memo, self._builders
        push, load_persistent = stack.append, self._persistent
        matchers, numbered_memo = self._matchers, memo if isinstance(memo, NumberedMemo) else None
        tensor_function, tensor_memo = self._tensor_function, {} if isinstance(memo, NumberedMemo) else memo
        match_tensor = None if self._tensor_calls is None else self._tensor_calls.match
        try:
            while True:
                for _ in repeat(None, _BETWEEN_CHECKS):
                    op = data[pos]
                    pos += 1
                    if op == BINGET:
                        pos += 1
                        known = memo[data[pos - 1]]
                        if known is SKIPPED:
                            raise NeedsPlainRead
                        push(known)
                    elif op == MARK:
                        if stack and stack[-1] is tensor_function and match_tensor is not None:
                            matched = match_tensor(data, pos - 1, size, tensor_memo)
                            if matched is not None:
                                stack[-1], pos = matched
                                continue
                        outer_stacks.append(stack)
                        stack = self.stack = []
                        push = stack.append
                    elif op == MEMOIZE:
                        if numbered_memo is None:
                            memo[len(memo)] = stack[-1]
                        else:
                            numbered_memo.append(stack[-1])
                    elif op == LONG_BINPUT:
                        pos += 4
                        memo[_u4(data, pos - 4)[0]] = stack[-1]
                    elif op == BINUNICODE:
                        begin = pos + 4
                        pos = begin + _u4(data, pos)[0]
                        if pos > size:
                            raise self.truncated(pos)
                        push(data[begin:pos].decode("utf-8", "surrogatepass"))
                    elif op == LONG_BINGET:
                        pos += 4
                        known = memo[_u4(data, pos - 4)[0]]
                        if known is SKIPPED:
                            raise NeedsPlainRead
                        push(known)
                    elif op == SHORT_BINUNICODE:
                        begin = pos + 1
                        pos = begin + data[pos]
                        if pos > size:
                            raise self.truncated(pos)
                        push(data[begin:pos].decode("utf-8", "surrogatepass"))
                    elif op == BININT1:
                        pos += 1
                        push(data[pos - 1])
                    elif op == TUPLE:
                        value = tuple(stack)
                        stack = self.stack = outer_stacks.pop()
                        push = stack.append
                        push(value)
                    elif op == REDUCE:
                        args = stack.pop()
                        function = stack[-1]
                        if type(args) is not tuple:
                            raise TypeError
                        build = builders.get(id(function))
                        if build is not None:
                            self.pos = pos
                            value = build(function, args, self.where)
                            stack[-1] = self._intern(value) if type(value) is Global else value
                        elif type(function) is Global:
                            stack[-1] = Record(function, args)
                        else:
                            self._refuse_call(function)
                    elif op == BINPUT:
                        pos += 1
                        memo[data[pos - 1]] = stack[-1]
                    elif op == TUPLE2:
                        second = stack.pop()
                        stack[-1] = (stack[-1], second)
                    elif op == TUPLE1:
                        stack[-1] = (stack[-1],)
                    elif op == BININT2:
                        pos += 2
                        push(_u2(data, pos - 2)[0])
                    elif op == BININT:
                        pos += 4
                        push(_i4(data, pos - 4)[0])
                    elif op == BINPERSID:
                        if load_persistent is None:
                            raise self.unsafe("the pickle refers to something outside of itself")
                        self.pos = pos
                        stack[-1] = load_persistent(stack[-1])
                    elif op == NEWFALSE:
                        push(False)
                    elif op == EMPTY_TUPLE:
                        push(())
                        if numbered_memo is not None and len(stack) > 1 and id(stack[-2]) in matchers:
                            pos = self._read_compact_records(numbered_memo, stack, pos)
                    elif op == BINFLOAT:
                        pos += 8
                        push(_f8(data, pos - 8)[0])
                    elif op == NONE:
                        push(None)
                    elif op == EMPTY_DICT:
                        push({})
                    elif op == EMPTY_LIST:
                        push([])
                    elif op == NEWTRUE:
                        push(True)
                    elif op == TUPLE3:
                        third, second = stack.pop(), stack.pop()
                        stack[-1] = (stack[-1], second, third)
                    elif op == STOP:
                        if outer_stacks or len(stack) != 1:
                            raise self.corrupt("unbalanced")
                        return stack[0]
                    else:
                        rare = RARE.get(op)
                        self.pos = pos
                        if rare is None:
                            raise self.truncated() if pos > size else self.corrupt(f"not one: it has an opcode {op:#x}")
                        rare(self)
                        pos = self.pos
                        tensor_function = self._tensor_function
                        if stack is not self.stack:
                            stack = self.stack
                            push = stack.append
                self._check_budgets()
        finally:
            self.pos = pos

    def _read_compact_records(self, memo: NumberedMemo, stack: list[Value], pos: int) -> int:
        """Read consecutive objects with forms, and push them. Returns the position after the last one.

        On top of the stack are a class and the empty tuple of its arguments. A short text may be before each object:
        in a dict of objects, it is the key.
        """
        data, size, push, matchers = self._data, self.size, stack.append, self._matchers_by_opcodes
        match = self._matchers[id(stack[-2])].match(data, pos, memo)
        if match is not None:
            del stack[-2:]
        while match is not None:
            record, pos = match
            push(record)
            if data[pos] == SHORT_BINUNICODE:
                end = pos + 2 + data[pos + 1]
                if end >= size or data[end] != MEMOIZE:
                    break
                try:
                    text = data[pos + 2 : end].decode("utf-8", "surrogatepass")
                except UnicodeDecodeError:
                    break  # the interpreter reports it
                push(text)
                memo.append(text)
                pos = end + 1
            begin = pos + (6 if data[pos] == LONG_BINGET else 3)
            opcodes = data[pos:begin]
            matcher = matchers[opcodes] if opcodes in matchers else self._matcher_for(opcodes, memo)
            match = None if matcher is None or len(stack) >= MAX_STACK else matcher.match(data, begin, memo)
        return pos

    def _matcher_for(self, opcodes: bytes, memo: NumberedMemo) -> FormMatcher | None:
        """The matcher of the class whose objects begin with these opcodes: a GET of the class, and EMPTY_TUPLE."""
        at = int.from_bytes(opcodes[1:-1], "little")
        is_get = opcodes[0] in (BINGET, LONG_BINGET) and opcodes[-1] == EMPTY_TUPLE and at < len(memo)
        matcher = self._matchers_by_opcodes[opcodes] = self._matchers.get(id(memo[at])) if is_get else None
        return matcher

    def _check_budgets(self) -> None:
        self._ops += _BETWEEN_CHECKS
        tensors = 0 if self._tensor_calls is None else self._tensor_calls.count
        height = len(self.stack) + sum(map(len, self.outer_stacks[-2:]))
        if (
            self._ops + OPCODES * tensors > MAX_OPS
            or height > MAX_STACK
            or len(self.outer_stacks) > MAX_MARKS
            or len(self.memo) > MAX_MEMO
        ):
            raise self.unsafe("the pickle is larger than that of any checkpoint and would exhaust memory")

    # Helpers of several opcodes.

    def take(self, nbytes: int) -> bytes:
        """The next bytes. Raises `Truncated`."""
        begin, end = self.pos, self.pos + nbytes
        if end > self.size:
            raise self.truncated(end)
        self.pos = end
        return self._data[begin:end]

    def line(self, limit: int = _MAX_LINE) -> bytes:
        """The bytes up to the next newline, which is skipped. Raises `Truncated` or `CorruptError`."""
        end = self._data.find(b"\n", self.pos, min(self.size, self.pos + limit + 1))
        if end < 0:
            if self.size <= self.pos + limit:
                raise self.truncated()
            raise self.corrupt("malformed: a line is too long")
        begin, self.pos = self.pos, end + 1
        return self._data[begin:end]

    def pop(self) -> Value:
        """Pop the top of the stack."""
        return self.stack.pop()

    def pop_mark(self) -> list[Value]:
        """Pop what was pushed since the last MARK."""
        top = self.stack
        self.stack = self.outer_stacks.pop()
        return top

    def push(self, value: Value) -> None:
        """Push a value on the stack."""
        self.stack.append(value)

    def name(self, module: Value, name: Value) -> Global:
        """The `Global` of a name. There is one object per name, so that it can be compared by identity.

        Raises `UnsafeError` if the allow list does not permit the name.
        """
        if type(module) is not str or type(name) is not str:
            raise self.corrupt("malformed: a name is not text")
        known = self.globals.get((module, name))
        if known is not None:
            return known
        if reason := refusal(module, name):
            shown = f"{module}.{name}".encode("unicode_escape").decode("ascii")
            raise self.unsafe(f"the pickle names `{shown:.200}`, which {reason}")
        return self._intern(Global(module, name))

    def _intern(self, value: Global) -> Global:
        key = (value.module, value.name)
        if key not in self.globals:
            if len(self.globals) >= MAX_GLOBALS:
                raise self.unsafe("the pickle names more classes than any checkpoint has")
            self.globals[key] = value
            if build := BUILDERS.get(key):
                self._builders[id(value)] = build
            if key == FUNCTION and self._tensor_calls is not None:
                self._tensor_function = value
            if form := self._forms.get(key):
                self._matchers[id(value)] = FormMatcher(form)
        return self.globals[key]

    def call(self, function: Value, args: Value, *, new: bool = False, kwargs: dict[str, Value] | None = None) -> Value:
        """The value of a call. With `new`, the call is `function.__new__(function, *args)`."""
        if type(args) is not tuple:
            raise self.corrupt("malformed: arguments that are not a tuple")
        if type(function) is not Global:
            self._refuse_call(function)
        build = BUILDERS.get((function.module, function.name))
        if build is None:
            return Record(function, args, kwargs or {}, new=new)
        if kwargs or (new and (function.module, function.name) not in CLASS_BUILDERS):
            raise self.corrupt(f"malformed: {function} cannot be constructed in this way")
        value = build(function, args, self.where)
        return self._intern(value) if type(value) is Global else value

    def _refuse_call(self, function: Value) -> NoReturn:
        raise self.unsafe(f"the pickle calls {kind_of(function)} instead of a plain name")

    def set_items(self, target: Value, items: list[Value]) -> None:
        """Put keys and values, which alternate in `items`, into a dict or a `Record`."""
        if len(items) % 2:
            raise self.corrupt("malformed: a key without a value")
        keys, values = items[::2], items[1::2]
        if isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                target[key if type(key) is str else hashable(key, self.where, self.hashes_of(target))] = value
        elif type(target) is Record:
            target.mapping.extend(zip(keys, values, strict=True))
        else:
            raise self.corrupt(f"malformed: it sets an item of {kind_of(target)}")

    def hashes_of(self, target: dict[Value, Value] | set[Value]) -> KeyHashes:
        """The hashes of the keys that were put into a dict or set so far."""
        if id(target) not in self._hashes:
            self._hashes[id(target)] = (target, KeyHashes())
        return self._hashes[id(target)][1]

    def extend(self, target: Value, items: list[Value]) -> None:
        """Append items to a list or a `Record`."""
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record:
            target.items.extend(items)
        else:
            raise self.corrupt(f"malformed: it appends to {kind_of(target)}")

    def build(self, target: Value, state: Value) -> None:
        """Set the state of an object: its attributes, or the argument of its `__setstate__`."""
        if type(target) is Record:
            if target.state is not None:
                raise self.corrupt("malformed: an object gets its state twice")
            target.state = state
        elif type(target) is StdDict:
            if not isinstance(state, dict) or not all(type(key) is str for key in state):
                raise self.corrupt("malformed: the attributes of a dict are not a dict")
            target.attrs.update(state)
        elif type(target) is np.ndarray:
            arrays.fill(target, state, self.where)
        else:
            raise self.corrupt(f"malformed: it gives a state to {kind_of(target)}")
