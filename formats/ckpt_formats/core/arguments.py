"""What an argument may be: stated once, by its annotation, and checked where it is given.

A dataclass derived from `Checked` checks its fields when it is constructed, and a function decorated with `checked` its
arguments when it is called. The annotation states the type, and `Annotated` what the type does not: a `Range` of
numbers, or the texts that an `Admits` function takes. The shell's options take their ranges from the same annotations.

An argument is taken as what it means where this is not a guess: a text as the one pattern of a sequence of patterns or
as a path, a list as a tuple, an integer of NumPy as an integer, and its array of one dimension as a list. All else
raises `InvalidArgumentError`.
"""

import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set, ValuesView
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from functools import cache, wraps
from inspect import Parameter, get_annotations, signature
from math import inf, isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.short_repr import ShortRepr

P = ParamSpec("P")
R = TypeVar("R")

URL_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
"""How a URL begins. What else is given is a path in the file system."""
_MAX_SHOWN = 60
_MAX_ARRAY = 1 << 20
"""Elements of an array that becomes a list."""


class Range(NamedTuple):
    """The numbers from `least` to `most`, both of them included unless `above` or `below` leaves them out."""

    least: float = -inf
    most: float = inf
    above: bool = False
    below: bool = False

    def admits(self, number: float) -> bool:
        """Whether a number is in the range."""
        return (self.least < number if self.above else self.least <= number) and (
            number < self.most if self.below else number <= self.most
        )

    def __str__(self) -> str:
        bounds = []
        if self.least > -inf:
            bounds.append(f"above {_number(self.least)}" if self.above else f"at least {_number(self.least)}")
        if self.most < inf:
            bounds.append(f"below {_number(self.most)}" if self.below else f"at most {_number(self.most)}")
        if len(bounds) == 2 and not (self.above or self.below):
            return f"from {_number(self.least)} to {_number(self.most)}"
        return " and ".join(bounds)


class Admits(NamedTuple):
    """Values that a function accepts, in words: for all others its result is false, or it raises."""

    words: str
    accepts: Callable[[Any], object]


MAX_RANKS = 1 << 16
"""Maximum of ranks along one dimension: more than any run has, and few enough to plan files for each."""
MAX_INTEGER = 1 << 62

Ranks = Annotated[int, Range(1, MAX_RANKS)]
"""A number of ranks along one dimension."""
Count = Annotated[int, Range(0, MAX_INTEGER)]
"""A number of things, of bytes, or of a step."""
Positive = Annotated[int, Range(1, MAX_INTEGER)]
"""A number of things or of bytes that is not zero."""
Workers = Annotated[int, Range(1, 256)]
"""A number of threads."""
ZeroStage = Annotated[int, Range(0, 3)]
"""A stage of ZeRO."""
Share = Annotated[float, Range(0, 1, above=True)]
"""A share of a whole that is not empty."""
Decay = Annotated[float, Range(0, 1, below=True)]
"""By how much an average decays from one state to the next."""
Increase = Annotated[float, Range(0)]
"""By how much a number may increase."""


StrPath = str | os.PathLike[str]
"""A path or a URL of the user. A text stays a text, since a URL is no path of the file system."""
LocalPath = Annotated[str | os.PathLike[str], "local"]
"""A path in the file system, of which a text becomes a `Path`; a URL is refused. A `Path` of a store stays one."""
MAY_BE_INFINITE = "may be infinite"
"""Marks a number that is a result and may be infinite."""


class Refused(Exception):
    """A value is not what an annotation states."""


class ArgumentKind(NamedTuple):
    """The values that an annotation states: in words, and as a function that returns the value or raises `Refused`."""

    words: str
    take: Callable[[Any], Any]
    exact: type | None = None
    """A class whose every object is taken as it is."""


class Checked(ShortRepr):
    """The base of dataclasses that check their fields when they are constructed.

    A class that also has conditions between its fields states them in its own `__post_init__`, after this one. The
    `repr` is a line, however much the fields hold: error messages and debuggers show it.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(one: Any) -> None:
    """Check all fields of a dataclass, and set those that were given in another form. Raises `InvalidArgumentError`."""
    kind: Any = type(one)
    for name, stated in _kinds_of_fields(kind):
        value = getattr(one, name)
        taken = _taken(kind.__name__, name, stated, value)
        if taken is not value:
            object.__setattr__(one, name, taken)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises `InvalidArgumentError` for arguments that are not as their annotations state."""

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        stated, parameters = _kinds_of_parameters(function)
        owner = function.__qualname__.removesuffix(".__init__")
        try:
            bound = parameters.bind(*arguments, **named)
        except TypeError:
            return function(*arguments, **named)  # Python's own message names the function
        for name, value in bound.arguments.items():
            if name in stated:
                bound.arguments[name] = _taken(owner, name, stated[name], value)
        return function(*bound.args, **bound.kwargs)

    return call


def annotations_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The names of a dataclass's fields, and their annotations; those that only type checkers know are `Any`."""
    owners = {name: base for base in reversed(kind.__mro__) for name in get_annotations(base)}
    for one in fields(kind):
        owner = owners.get(one.name, kind)
        yield one.name, _evaluated(one.type, owner.__module__)


def invalid(owner: str, name: str, words: str, value: object) -> InvalidArgumentError:
    """The error for a value that an argument cannot have, in one sentence."""
    return InvalidArgumentError(f"{owner}: {name} must be {words}, not {shown(value)}")


def shown(value: object) -> str:
    """A value in an error: its `repr`, cut short."""
    try:
        text = repr(value)
    except Exception:  # whatever a stranger's class does
        text = f"an object of the class {type(value).__name__}"
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: _MAX_SHOWN + 1])
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def _taken(owner: str, name: str, stated: ArgumentKind, value: Any) -> Any:
    try:
        return stated.take(value)
    except Refused:
        raise invalid(owner, name, stated.words, value) from None


@cache
def _kinds_of_fields(kind: type) -> tuple[tuple[str, ArgumentKind], ...]:
    stated = ((name, _kind(annotation)) for name, annotation in annotations_of(kind))
    return tuple((name, one) for name, one in stated if one is not _ANYTHING)


@cache
def _kinds_of_parameters(function: Callable[..., Any]) -> tuple[dict[str, ArgumentKind], Any]:
    parameters = signature(function)
    stated = {
        name: _kind(_evaluated(one.annotation, function.__module__))
        for name, one in parameters.parameters.items()
        if one.annotation is not Parameter.empty and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    }
    return {name: one for name, one in stated.items() if one is not _ANYTHING}, parameters


def _evaluated(annotation: Any, module: str) -> Any:
    """An annotation that is a text becomes what it names. What only type checkers import is `Any`."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[module]))  # an annotation in our own source
    except NameError:
        return Any


def _anything(value: Any) -> Any:
    return value


_ANYTHING = ArgumentKind("anything", _anything)


def _kind(annotation: Any) -> ArgumentKind:
    """The values that an annotation states."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is os.PathLike:
        return ArgumentKind("a path", _path_or_text)
    if origin is Annotated:
        return _narrowed(_kind(arguments[0]), annotation.__metadata__)
    if origin in (Union, types.UnionType):
        return _any_of(list(map(_kind, sorted(arguments, key=_converts))))
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _tuple_of(arguments)
    if origin in (Sequence, Collection, Iterable):
        sequence = _sequence_of(_kind(arguments[0]))
        return _or_iterator(sequence) if origin is Iterable else sequence
    if origin is Callable or annotation is Callable:
        return _instance("a function", callable)
    plain = origin or annotation
    if not isinstance(plain, type) or plain is object or typing.is_typeddict(plain):
        return _ANYTHING
    if getattr(plain, "_is_protocol", False):
        return _of_protocol(plain)
    return _instance(_named(plain), lambda value: isinstance(value, plain), plain)


def _converts(annotation: Any) -> int:
    """Alternatives that take a value in another form come after those that take it as it is."""
    origin = get_origin(annotation) or annotation
    return (
        (tuple, Sequence, Collection, Iterable).index(origin) + 2
        if origin
        in (
            tuple,
            Sequence,
            Collection,
            Iterable,
        )
        else int(origin is Path)
    )


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise Refused


def _real(value: Any) -> Any:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise Refused from None
        if isfinite(number):
            return value if isinstance(value, (int, float)) else number
    raise Refused


def _real_or_infinite(value: Any) -> Any:
    return value if isinstance(value, float) else _real(value)


def _path(value: Any) -> Path:
    if isinstance(value, Path):
        return value
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str):
            return Path(text)
    raise Refused


def _local_path(value: Any) -> Path:
    """A path that was opened as it is, and what a text names in the file system."""
    path = _path(value)
    if path is not value and (not os.fspath(value) or URL_SCHEME.match(os.fspath(value))):
        raise Refused
    return path


def as_path(value: str | os.PathLike[str]) -> Path:
    """A `Path` as it is, also one of a store, which `Path(value)` would take for a local one; or that of a text."""
    return value if isinstance(value, Path) else Path(value)


def _path_or_text(value: Any) -> Path | str:
    """A path as it is, and what another object names as a text: it may be a URL."""
    if isinstance(value, Path):
        return value
    if isinstance(value, os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str):
            return text
    raise Refused


def _instance(words: str, accepts: Callable[[Any], object], exact: type | None = None) -> ArgumentKind:
    def take(value: Any) -> Any:
        if accepts(value):
            return value
        raise Refused

    return ArgumentKind(words, take, exact)


_PLAIN: dict[Any, ArgumentKind] = {
    Any: _ANYTHING,
    None: _instance("None", lambda value: value is None),
    type(None): _instance("None", lambda value: value is None),
    int: ArgumentKind("a whole number", _whole, int),
    float: ArgumentKind("a finite number", _real),
    bool: _instance("True or False", lambda value: isinstance(value, bool), bool),
    str: _instance("a text", lambda value: isinstance(value, str), str),
    Path: ArgumentKind("a path", _path),
    LocalPath: ArgumentKind("a local path", _local_path),
}


def _narrowed(base: ArgumentKind, conditions: tuple[Any, ...]) -> ArgumentKind:
    words, take, _ = base
    for condition in conditions:
        if condition == MAY_BE_INFINITE:
            words, take = "a number", _in_range(_real_or_infinite, Range())
        elif isinstance(condition, Range):
            words, take = f"{words.replace('finite ', '')} {condition}", _in_range(take, condition)
        elif isinstance(condition, Admits):
            words, take = condition.words, _admitted(take, condition.accepts)
    return ArgumentKind(words, take)


def _in_range(take: Callable[[Any], Any], bounds: Range) -> Callable[[Any], Any]:
    def within(value: Any) -> Any:
        number = take(value)
        if bounds.admits(number):
            return number
        raise Refused

    return within


def _admitted(take: Callable[[Any], Any], accepts: Callable[[Any], object]) -> Callable[[Any], Any]:
    def admitted(value: Any) -> Any:
        taken = take(value)
        try:
            refused = not accepts(taken)
        except Exception:  # it has its own words; the error has those of the condition
            refused = True
        if refused:
            raise Refused
        return taken

    return admitted


def _any_of(kinds: list[ArgumentKind]) -> ArgumentKind:
    if _ANYTHING in kinds:
        return _ANYTHING

    def take(value: Any) -> Any:
        for one in kinds:
            with suppress(Refused):
                return one.take(value)
        raise Refused

    words = dict.fromkeys(one.words for one in sorted(kinds, key=lambda one: one.words == "None"))
    if "a path" in words:
        words.pop("a text", None)
    return ArgumentKind(" or ".join(words), take)


def _literal(choices: tuple[Any, ...]) -> ArgumentKind:
    def accepts(value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in choices)

    return _instance(" or ".join(map(repr, choices)), accepts)


def _tuple_of(arguments: tuple[Any, ...]) -> ArgumentKind:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence_of(_kind(arguments[0]), tuple)
    kinds = list(map(_kind, arguments))

    def take(value: Any) -> Any:
        if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
            raise Refused
        return tuple(one.take(part) for one, part in zip(kinds, value, strict=True))

    return ArgumentKind(f"{len(kinds)} values: {', '.join(one.words for one in kinds)}", take)


def _sequence_of(one: ArgumentKind, form: type | None = None) -> ArgumentKind:
    """Sequences of one kind; a text is one of it, where that is a text. `form`: tuples, and lists become tuples."""

    def take(value: Any) -> Any:
        if isinstance(value, str):
            return (one.take(value),)
        forms = (tuple, list) if form is not None else (Sequence, Set)
        if one is not _ANYTHING and not isinstance(value, forms):
            value = _listed(value)
        if isinstance(value, (bytes, bytearray)) or not isinstance(value, forms):
            raise Refused
        if one is _ANYTHING or not isinstance(value, (tuple, list, set, frozenset)):  # others may be computed
            return value if form is None or isinstance(value, form) else tuple(value)
        if one.exact is not None and isinstance(value, form or (tuple, list)) and set(map(type, value)) <= {one.exact}:
            return value
        taken = [one.take(part) for part in value]
        same = isinstance(value, form or (tuple, list)) and all(a is b for a, b in zip(taken, value, strict=True))
        return value if same else tuple(taken)

    words = one.words.removeprefix("a ").removeprefix("an ")
    plural = f"values, each {one.words}" if " " in words else f"{words.removesuffix('s')}s"
    return ArgumentKind(f"a sequence of {plural}", take)


def _listed(value: Any) -> Any:
    """The items of an array of NumPy of one dimension, and the values of a mapping, as a list; all else as it is."""
    numpy = sys.modules.get("numpy")  # who gives an array has imported it
    is_array = numpy is not None and isinstance(value, numpy.ndarray) and value.ndim == 1 and value.size <= _MAX_ARRAY
    return value.tolist() if is_array else list(value) if isinstance(value, ValuesView) else value


def _or_iterator(sequence: ArgumentKind) -> ArgumentKind:
    """An iterator as it is, whose items may not be there yet, or a sequence."""
    return ArgumentKind(sequence.words, lambda value: value if isinstance(value, Iterator) else sequence.take(value))


def _of_protocol(protocol: type) -> ArgumentKind:
    names = [name for name in vars(protocol) if not name.startswith("_") or name == "__call__"]
    return _instance(_named(protocol), lambda value: all(callable(getattr(value, name, None)) for name in names))


def _named(kind: type) -> str:
    if issubclass(kind, Enum):
        return " or ".join(str(one) for one in kind)
    name = kind.__name__.lower() if kind.__module__ in ("collections.abc", "builtins") else kind.__name__
    is_vowel = name[0].lower() in "aeiou" and not name.startswith("Uni")  # as in "a Universal"
    return f"{'an' if is_vowel else 'a'} {name}"


def _number(value: float) -> str:
    if value == MAX_INTEGER:
        return "2^62"
    return f"{value:,.0f}" if value == int(value) and value < 1 << 53 else f"{value:.3g}"
