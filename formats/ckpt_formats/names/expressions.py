"""Expressions over a model's configuration: `heads * head_dim`, `layer in mlp_only_layers`.

The tables of families and dialects state sizes and conditions as expressions. The tables are part of ckpt, but the
values come from untrusted files. So the language has no calls and no attributes, and every value is checked before an
operation: nothing is repeated or concatenated, and no result exceeds 2**62.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import cast

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.short_repr import cut

Scope = Mapping[str, object]
"""The values of names. A name that is missing has the value None, as an entry that a configuration omits."""
_Compute = Callable[[Scope], object]

_MAX_INTEGER = 1 << 62
_MAX_STEPS = 100_000
"""Steps of a list comprehension."""
_MAX_MEMBERS = 10_000
"""Entries of a list that `in` searches: each step of a comprehension may search it."""
_MAX_SHOWN = 48
"""Characters of a value in a message."""
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True)
class Expression:
    """A parsed expression. Two expressions are equal if their texts are equal."""

    text: str
    names: tuple[str, ...] = field(compare=False, repr=False)
    """The names that it reads from a scope, in the order of the text, each once."""
    compute: _Compute = field(compare=False, repr=False)
    """Returns the value in a scope. Raises `UnsuitableValueError` and `RecursionError`: see `evaluate`."""


class InnerScope(Mapping[str, object]):
    """A scope with further names, as those of a layer, an expert or a step of a comprehension.

    It shares the outer scope, which is not copied: a model of many experts has an inner scope for each of its tensors.
    """

    __slots__ = ("_outer", "_own")

    def __init__(self, outer: Scope, own: Scope) -> None:
        self._outer, self._own = outer, own

    def __getitem__(self, name: str) -> object:
        return self._own[name] if name in self._own else self._outer[name]

    # The one of `Mapping` raises an exception for each name that is missing.
    def get(self, name: str, default: object = None) -> object:
        return self._own[name] if name in self._own else self._outer.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._outer, *self._own]))

    def __len__(self) -> int:
        return len(self._outer.keys() | self._own.keys())


class UnsuitableValueError(Exception):
    """A value of a kind or size that an operation does not accept."""


@cache
def parse_expression(text: str) -> Expression:
    """Parse an expression.

    The language is a part of Python's: None, booleans, integers, floats, strings, names, lists, tuples, subscripts;
    `+ - * // %`, `not and or`, one comparison at a time, `in`, `not in`; `a if b else c`; and list comprehensions with
    one `for`, not nested, over a list or over the integers below n.

    Raises `ValueError` for anything else.

    >>> evaluate(parse_expression("heads * (head_dim or 128)"), {"heads": 8})
    1024
    >>> evaluate(parse_expression("[1 if layer % 2 else 0 for layer in layers]"), {"layers": 4})
    [0, 1, 0, 1]
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"`{text}` is not an expression") from error
    return replace(expression_of(node), text=text.strip())


def expression_of(node: ast.expr) -> Expression:
    """The expression of a syntax tree of Python. Raises `ValueError` for trees outside the language."""
    compute = _compiled(node)  # refuses what `_free_names` does not know
    return Expression(ast.unparse(node), tuple(dict.fromkeys(_free_names(node))), compute)


def names_of(expression: Expression) -> frozenset[str]:
    """The names that an expression reads from its scope."""
    return frozenset(expression.names)


def evaluate(expression: Expression, scope: Scope, where: str | Path = "config.json") -> object:
    """The value of an expression. `where`: the file that states the values, for the message.

    Integers have at most 2**62 as their absolute value. Sums, products and comparisons by order need numbers, not
    booleans; sums and products need integers. `x in None` is False, `None[i]` is None, and an entry that a table lacks
    is None. Raises `CorruptError` for values that an operation does not accept.
    """
    try:
        value = expression.compute(scope)
        if type(value) is int and abs(value) > _MAX_INTEGER:
            raise UnsuitableValueError
    except (UnsuitableValueError, RecursionError) as error:
        shown = [f"{name} = {shown_value(scope.get(name))}" for name in expression.names[:_MAX_NAMES_SHOWN]]
        values = f" with {', '.join(shown)}" if shown else ""
        raise CorruptError(f"`{expression.text}` cannot be computed{values}", where=where) from error
    return value


def natural(expression: Expression, scope: Scope, where: str | Path = "config.json") -> int:
    """The value of an expression that states a size or count: an integer >= 0.

    Raises `CorruptError` for any other value, and as `evaluate`.
    """
    value = evaluate(expression, scope, where)
    if type(value) is not int or value < 0:
        raise CorruptError(f"`{expression.text}` is {shown_value(value)}: it must be an integer >= 0", where=where)
    return value


def shown_value(value: object) -> str:
    """A value of an untrusted configuration for people: short and printable.

    >>> shown_value("gelu"), shown_value([1, 2]), shown_value(1 << 9999)
    ("'gelu'", 'a list of 2', 'an integer of 10000 bits')
    """
    if isinstance(value, int) and value.bit_length() > 64:  # Python does not print those of over 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return cut(repr(value[:_MAX_SHOWN]), _MAX_SHOWN)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"a table of {len(value)}" if isinstance(value, Mapping) else f"a value of type {type(value).__name__}"


# --- parsing ---


def _free_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.ListComp):
        (loop,) = node.generators
        inner = [name for part in (node.elt, *loop.ifs) for name in _free_names(part)]
        own = loop.target.id if isinstance(loop.target, ast.Name) else None
        return [*_free_names(loop.iter), *(name for name in inner if name != own)]
    return [name for child in ast.iter_child_nodes(node) for name in _free_names(child)]


def _compiled(node: ast.expr) -> _Compute:
    compile_node = _COMPILERS.get(type(node))
    if compile_node is None:
        raise ValueError(f"`{ast.unparse(node)}` is not allowed in an expression")
    return compile_node(node)


def _constant(node: ast.Constant) -> _Compute:
    value = node.value
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError(f"the constant {ast.unparse(node)} is not allowed in an expression")
    return lambda scope: value


def _name(node: ast.Name) -> _Compute:
    name = node.id
    return lambda scope: scope.get(name)


def _list(node: ast.List | ast.Tuple) -> _Compute:
    parts = [_compiled(part) for part in node.elts]
    if isinstance(node, ast.Tuple):
        return lambda scope: tuple(part(scope) for part in parts)
    return lambda scope: [part(scope) for part in parts]


def _subscript(node: ast.Subscript) -> _Compute:
    base, index = _compiled(node.value), _compiled(node.slice)
    return lambda scope: _entry(base(scope), index(scope))


def _not(operand: _Compute) -> _Compute:
    return lambda scope: not operand(scope)


def _unary(node: ast.UnaryOp) -> _Compute:
    operand = _compiled(node.operand)
    if isinstance(node.op, ast.Not):
        return _not(operand)
    if isinstance(node.op, ast.USub):
        return lambda scope: -_integer(operand(scope))
    raise ValueError(f"`{ast.unparse(node)}` is not allowed in an expression")


def _arithmetic(node: ast.BinOp) -> _Compute:
    compute = _ARITHMETIC.get(type(node.op))
    if compute is None:
        raise ValueError(f"`{ast.unparse(node)}` is not allowed in an expression")
    left, right, divides = _compiled(node.left), _compiled(node.right), isinstance(node.op, (ast.FloorDiv, ast.Mod))

    def value(scope: Scope) -> int:
        a, b = _integer(left(scope)), _integer(right(scope))
        if divides and b == 0:
            raise UnsuitableValueError
        return _integer(compute(a, b))

    return value


def _comparison(node: ast.Compare) -> _Compute:
    kind = type(node.ops[0])
    if len(node.ops) != 1 or kind not in _COMPARISONS:
        raise ValueError(f"`{ast.unparse(node)}`: an expression compares two values at a time, not by identity")
    left, right, compare = _compiled(node.left), _compiled(node.comparators[0]), _COMPARISONS[kind]
    return lambda scope: compare(left(scope), right(scope))


def _boolean(node: ast.BoolOp) -> _Compute:
    *first, last = (_compiled(part) for part in node.values)
    decisive = isinstance(node.op, ast.Or)

    def value(scope: Scope) -> object:
        for part in first:
            if bool(result := part(scope)) == decisive:
                return result
        return last(scope)

    return value


def _conditional(node: ast.IfExp) -> _Compute:
    test, body, otherwise = _compiled(node.test), _compiled(node.body), _compiled(node.orelse)
    return lambda scope: body(scope) if test(scope) else otherwise(scope)


def _comprehension(node: ast.ListComp) -> _Compute:
    loop = node.generators[0]
    inner = (node.elt, loop.iter, *loop.ifs)
    nested = any(isinstance(child, ast.ListComp) for part in inner for child in ast.walk(part))
    if len(node.generators) > 1 or len(loop.ifs) > 1 or loop.is_async or nested:
        raise ValueError(
            f"`{ast.unparse(node)}`: a comprehension has one `for` and at most one `if`, and is not nested"
        )
    if not isinstance(loop.target, ast.Name):
        raise ValueError(f"`{ast.unparse(node)}`: a comprehension has one variable")
    name, items, element = loop.target.id, _compiled(loop.iter), _compiled(node.elt)
    condition = _compiled(loop.ifs[0]) if loop.ifs else None

    def value(scope: Scope) -> list[object]:
        own: dict[str, object] = {}
        inner, result = InnerScope(scope, own), []
        for item in _steps(items(scope)):
            own[name] = item
            if condition is None or condition(inner):
                result.append(element(inner))
        return result

    return value


# --- computing ---


def _integer(value: object) -> int:
    if type(value) is not int or not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise UnsuitableValueError
    return value


def _entry(base: object, index: object) -> object:
    if base is None:
        return None
    if isinstance(base, Mapping) and isinstance(index, str):
        return base.get(index)
    if isinstance(base, (list, tuple)) and type(index) is int and -len(base) <= index < len(base):
        return cast(object, base[index])
    raise UnsuitableValueError


def _steps(items: object) -> list[object] | tuple[object, ...] | range:
    if type(items) is int and 0 <= items <= _MAX_STEPS:
        return range(items)
    if isinstance(items, (list, tuple)) and len(items) <= _MAX_STEPS:
        return items
    raise UnsuitableValueError


def _is_member(value: object, container: object) -> bool:
    if container is None:
        return False
    if isinstance(container, Mapping) and isinstance(value, str):
        return value in container
    if isinstance(container, (list, tuple)) and len(container) <= _MAX_MEMBERS:
        return value in container
    raise UnsuitableValueError


def _by_order(compare: Callable[[float, float], bool]) -> Callable[[object, object], bool]:
    def value(a: object, b: object) -> bool:
        if type(a) not in (int, float) or type(b) not in (int, float):
            raise UnsuitableValueError
        return compare(cast(float, a), cast(float, b))

    return value


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_COMPARISONS: dict[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: _by_order(operator.lt),
    ast.LtE: _by_order(operator.le),
    ast.Gt: _by_order(operator.gt),
    ast.GtE: _by_order(operator.ge),
    ast.In: _is_member,
    ast.NotIn: lambda value, container: not _is_member(value, container),
}

_COMPILERS: dict[type[ast.expr], Callable[..., _Compute]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.List: _list,
    ast.Tuple: _list,
    ast.Subscript: _subscript,
    ast.UnaryOp: _unary,
    ast.BinOp: _arithmetic,
    ast.Compare: _comparison,
    ast.BoolOp: _boolean,
    ast.IfExp: _conditional,
    ast.ListComp: _comprehension,
}
