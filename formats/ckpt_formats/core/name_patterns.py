"""Regular expressions matched against names in time bounded by the product of both lengths.

Rules are stored in checkpoints, so both the patterns and the names are untrusted. Python's matcher goes back and tries
again, and with several repeats in a row the number of tries is a power of the name's length. So it is only asked where
that power is small. Elsewhere all ways to match are followed at once, character by character (Thompson, CACM 1968),
and each step that was computed is kept. What a single character matches is always decided by Python's own matcher.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, Literal

from ckpt_formats.core.claims import MAX_NEW_NAME
from ckpt_formats.core.errors import RulesError, UnsafeError
from ckpt_formats.core.text import printable

if sys.version_info >= (3, 11):
    from re import _compiler as regex_compiler  # type: ignore[attr-defined]
    from re import _parser as regex_parser  # type: ignore[attr-defined]
else:
    import sre_compile as regex_compiler
    import sre_parse as regex_parser

MAX_PATTERN = 1000
"""Characters of a pattern."""
_MAX_BACKTRACKS = 1e8
"""The count of four open repeats in a row, on a name of `_USUAL` characters."""
_USUAL = 100
_FEW_TRIES = 1e5
"""Up to this estimate, Python's matcher is used: it is faster by far."""
_MANY_TRIES = 1e8
"""Up to this estimate, it is used also for patterns that it alone can match: a second, or so."""
_MAX_STATES = 20_000
_MAX_TESTS = 50_000_000
"""How often, for all names together, a pattern may ask whether a character fits one of its places."""
_MAX_KEPT = 1 << 13
"""States in all steps of a pattern that are kept."""

Where = Literal["all", "start", "anywhere"]
"""What a pattern must match: the whole name, its start, or any part of it."""


def check_pattern(pattern: str, origin: str) -> None:
    """Raise `RulesError` for what is no regular expression, `UnsafeError` for one that could take too long.

    A choice within a repeat can take time exponential in the length of a name, and many repeats nearly as much.
    """
    if len(pattern) > MAX_PATTERN:
        raise UnsafeError(f"a name pattern of {len(pattern)} characters", where=origin)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = regex_parser.parse(pattern)
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RulesError(f"`{printable(pattern)}` is not a regular expression: {error}", where=origin) from None
    if _tries(tree, _USUAL) > _MAX_BACKTRACKS:
        raise UnsafeError(
            f"the pattern `{printable(pattern)}` has too many choices: a match may take too long",
            where=origin,
            hint="Write it without a repeat within a repeat.",
        )


def full_match(pattern: str, name: str) -> bool:
    """Whether a pattern that was checked matches the whole name. Raises `UnsafeError` if that takes too long."""
    return _compiled(pattern).matches(name, "all")


def match_start(pattern: str, name: str) -> bool:
    """The same for the start of the name."""
    return _compiled(pattern).matches(name, "start")


def search(pattern: str, name: str) -> bool:
    """The same for any part of the name."""
    return _compiled(pattern).matches(name, "anywhere")


def backtracking(pattern: str, longest: int) -> re.Pattern[str]:
    """Python's own form of a pattern, for names of at most `longest` characters.

    Raises `UnsafeError` if a match could take too long: only yes and no are known without going back, no groups.
    """
    compiled = _compiled(pattern)
    compiled.check_tries(longest, "anywhere")
    return compiled.regex


@lru_cache(1 << 16)
def _compiled(pattern: str) -> "_NamePattern":
    return _NamePattern(pattern)


class _NamePattern:
    def __init__(self, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = regex_parser.parse(text)
            self.regex = re.compile(text)
        self.text = text
        self.tested = 0
        self.prefix = _literal_prefix(self.tree)
        self._tries_of: dict[int, float] = {}

    def matches(self, name: str, where: Where) -> bool:
        if self.prefix and where != "anywhere" and not name.startswith(self.prefix):
            return False
        if self._tries(len(name), where) <= _FEW_TRIES:
            return self._by_python(name, where)
        if (steps := _steps_of(self)) is not None:
            return steps.matches(name, where)
        self.check_tries(len(name), where)
        return self._by_python(name, where)

    def check_tries(self, length: int, where: Where) -> None:
        """Raise `UnsafeError` if Python's matcher could take too long for a name of this length."""
        if self._tries(length, where) > _MANY_TRIES:
            raise _takes_too_long(self.text, f"a name of {length:,} characters")

    def _by_python(self, name: str, where: Where) -> bool:
        match = {"all": self.regex.fullmatch, "start": self.regex.match, "anywhere": self.regex.search}[where]
        return match(name) is not None

    def _tries(self, length: int, where: Where) -> float:
        if length not in self._tries_of:
            if len(self._tries_of) > MAX_NEW_NAME:
                self._tries_of.clear()
            self._tries_of[length] = _tries(self.tree, length + 1)
        tries = self._tries_of[length]
        return tries if tries == 1 else tries * (length + 1 if where == "anywhere" else 1)


@lru_cache(1 << 10)
def _steps_of(pattern: _NamePattern) -> "_Steps | None":
    """How to match without going back; None if the pattern has more than choices, repeats and characters."""
    try:
        return _Steps(_StateBuilder(pattern.text).build(pattern.tree), pattern)
    except _NotRegular:
        return None


def _takes_too_long(pattern: str, what: str) -> UnsafeError:
    return UnsafeError(
        f"the pattern `{printable(pattern)}` may take too long to match {what}",
        hint="Write it with fewer repeats, or say more exactly what they may match.",
    )


def _tries(tree: Any, length: int, repeated: bool = False) -> float:
    """How often Python's matcher may try again on a name of this length; infinite for a choice within a repeat."""
    total = 1.0
    for op, argument in tree:
        name, count = str(op), 1.0
        if name.endswith("_REPEAT"):
            low, high, inner = argument
            count = min(high - low + 1, length) * _tries(inner, length, repeated or high > 1)
        elif name == "SUBPATTERN":
            total *= _tries(argument[3], length, repeated)
        elif name == "ATOMIC_GROUP":
            total *= _tries(argument, length, repeated)
        elif name in ("ASSERT", "ASSERT_NOT"):
            total *= _tries(argument[1], length, repeated)
        elif name in ("BRANCH", "GROUPREF_EXISTS"):
            branches = argument[1] if name == "BRANCH" else argument[1:]
            count = sum(_tries(branch, length, repeated) for branch in branches if branch is not None)
        total *= inf if repeated and count > 1 else count
    return total


def _literal_prefix(tree: Any) -> str:
    """The characters with which every match begins."""
    prefix = []
    if tree.state.flags & re.IGNORECASE:
        return ""
    for op, argument in tree:
        if str(op) == "SUBPATTERN" and not argument[1] and not argument[2]:
            inner = _literal_prefix(argument[3])
            prefix.append(inner)
            if len(inner) != len(argument[3]):
                break
        elif str(op) == "LITERAL":
            prefix.append(chr(argument))
        else:
            break
    return "".join(prefix)


# Matching without going back

Test = Callable[[str], bool]


class _NotRegular(Exception):
    """The pattern has what cannot be matched by steps: references, assertions, word boundaries."""


@dataclass
class _State:
    """A place in the pattern. With a test, a character that passes leads to `next`; without, all of `next` are here."""

    test: Test | None = None
    next: tuple[int, ...] = ()
    at: Literal["", "start", "end", "last line"] = ""
    """Only passed at the start of the name, at its end, or at its end or before a last line break."""


class _StateBuilder:
    """The states of a pattern. State 0 is the match, and what follows a state is built before it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._states = [_State()]
        self._tests: dict[tuple[str, int], Test] = {}

    def build(self, tree: Any) -> list[_State]:
        """All states; the last one is where a match begins."""
        start = self._sequence(tree, 0, tree.state.flags)
        self._add(_State(None, (start,)))
        return self._states

    def _add(self, state: _State) -> int:
        if len(self._states) >= _MAX_STATES:
            raise _takes_too_long(self._text, "names")
        self._states.append(state)
        return len(self._states) - 1

    def _sequence(self, tree: Any, after: int, flags: int) -> int:
        for op, argument in reversed(list(tree)):
            after = self._one(str(op), op, argument, after, flags)
        return after

    def _one(self, name: str, op: Any, argument: Any, after: int, flags: int) -> int:
        if name in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "RANGE", "CATEGORY"):
            return self._add(_State(self._test(op, argument, flags), (after,)))
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = argument
            return self._repeat(low, high, inner, after, flags)
        if name == "SUBPATTERN":
            _, added, removed, inner = argument
            return self._sequence(inner, after, (flags | added) & ~removed)
        if name == "BRANCH":
            return self._add(_State(None, tuple(self._sequence(one, after, flags) for one in argument[1])))
        if name == "AT" and not flags & re.MULTILINE and str(argument) in _PLACES:
            return self._add(_State(None, (after,), _PLACES[str(argument)]))
        raise _NotRegular(name)

    def _repeat(self, low: int, high: int, inner: Any, after: int, flags: int) -> int:
        if high == regex_parser.MAXREPEAT:
            loop = self._add(_State())
            body = self._sequence(inner, loop, flags)
            self._states[loop].next = (body, after)
            after = loop
        elif max(low, high - low) > _MAX_STATES:
            raise _takes_too_long(self._text, "names")
        else:
            for _ in range(high - low):
                after = self._add(_State(None, (self._sequence(inner, after, flags), after)))
        for _ in range(min(low, _MAX_STATES + 1)):
            after = self._sequence(inner, after, flags)
        return after

    def _test(self, op: Any, argument: Any, flags: int) -> Test:
        if str(op) == "LITERAL" and not flags & re.IGNORECASE:
            return chr(argument).__eq__
        key = (f"{op} {argument}", flags)
        if key not in self._tests:
            one = regex_parser.SubPattern(_state_of(flags), [(op, argument)])
            self._tests[key] = regex_compiler.compile(one, flags).fullmatch
        return self._tests[key]


_PLACES: dict[str, Literal["start", "end", "last line"]] = {
    "AT_BEGINNING": "start",
    "AT_BEGINNING_STRING": "start",
    "AT_END": "last line",
    "AT_END_STRING": "end",
}


_ENDS = ("end", "last line")


def _state_of(flags: int) -> Any:
    state = regex_parser.State()
    state.flags = flags
    state.str = ""
    return state


class _Steps:
    """The states of a pattern, and the steps between sets of them that were computed."""

    def __init__(self, states: list[_State], pattern: _NamePattern) -> None:
        self._states, self._pattern = states, pattern
        self._cache: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._cached_states = 0
        self._begin = self._closure([len(states) - 1], at_start=True)
        self._again = self._closure([len(states) - 1], at_start=False)

    def matches(self, name: str, where: Where) -> bool:
        """Whether the pattern matches there."""
        here = self._begin
        for at, character in enumerate(name):
            if where != "all" and self._ends(here, name, at):
                return True
            if character == "\n" and at == len(name) - 1:  # `$` is also passed before the last line break
                here = self._closure(here, at == 0, ("last line",))
            after = self._cache.get((here, character))
            if after is None:
                after = self._step(here, character)
                self._add_to_cache(here, character, after)
            here = after | self._again if where == "anywhere" else after
            if not here:
                return False
        return self._ends(here, name, len(name))

    def _ends(self, here: frozenset[int], name: str, at: int) -> bool:
        """Whether the match is complete at this character."""
        if 0 in here:
            return True
        rest = len(name) - at
        passed = {"end", "last line"} if rest == 0 else {"last line"} if rest == 1 and name[at] == "\n" else set()
        if not passed:
            return False
        return 0 in self._closure([one for one in here if self._states[one].at in passed], at == 0, passed)

    def _step(self, here: frozenset[int], character: str) -> frozenset[int]:
        self._pattern.tested += len(here) + 1
        if self._pattern.tested > _MAX_TESTS:
            raise _takes_too_long(self._pattern.text, "all these names")
        return self._closure(self._after(here, character), at_start=False)

    def _add_to_cache(self, here: frozenset[int], character: str, after: frozenset[int]) -> None:
        states = len(here) + len(after) + 1
        self._cached_states += states
        if self._cached_states > _MAX_KEPT:
            self._cache.clear()
            self._cached_states = states
        self._cache[here, character] = after

    def _after(self, here: frozenset[int], character: str) -> Iterator[int]:
        for one in here:
            state = self._states[one]
            if state.test is not None and state.test(character):
                yield from state.next

    def _closure(self, begin: Any, at_start: bool, passed: Any = ()) -> frozenset[int]:
        """The states that are reached without a character: those with tests, those that wait for an end, the match."""
        seen: set[int] = set()
        waiting = list(begin)
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            state = self._states[one]
            if state.test is None and (state.at in ("", *passed) or (state.at == "start" and at_start)):
                waiting.extend(state.next)
        return frozenset(
            one for one in seen if one == 0 or self._states[one].test is not None or self._states[one].at in _ENDS
        )
