"""What can be wrong with a piece of Python: small faults, as people make them.

Each operator looks at one node of a function's body and gives the nodes that could stand there instead. Words that
people read (messages, notices, hints) are left alone: a fault in them is no fault of the program.
"""

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

Node = ast.expr | ast.stmt

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
_CALLS = {"sorted": "list", "min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list"}
_NO_SWAP = {"isinstance", "getattr", "hasattr", "cast", "issubclass", "print", "min", "max", "zip"}


@dataclass(frozen=True)
class Change:
    """One node, and what could stand there instead; no statements are a `pass`."""

    operator: str
    node: Node
    instead: ast.expr | list[ast.stmt]

    @property
    def text(self) -> str:
        after = self.instead
        new = "; ".join(map(_line, after)) if isinstance(after, list) else _line(after)
        return f"{_line(self.node)} → {new or 'nothing'}"


def changes(node: Node) -> Iterator[Change]:
    """Everything that could stand in this node's place."""
    for operator in _OPERATORS.get(type(node), ()):
        for instead in operator(node):
            yield Change(operator.__name__.strip("_"), node, instead)


def _line(node: ast.AST) -> str:
    text = ast.unparse(node).split("\n")
    return text[0] if len(text) == 1 else f"{text[0]} {text[1].strip()} …" if len(text) > 2 else " ".join(text)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [deepcopy(a) for a in arguments], [])


def _but_last(items: ast.expr) -> ast.expr:
    last = ast.UnaryOp(ast.USub(), ast.Constant(1))
    return ast.Subscript(_call("list", items), ast.Slice(None, last), ast.Load())


def _comparison(node: ast.Compare) -> Iterator[ast.expr]:
    if len(node.ops) == 1:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]], node.comparators)


def _always_member(node: ast.Compare) -> Iterator[ast.expr]:
    if len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield ast.Constant(isinstance(node.ops[0], ast.In))


def _and_or(node: ast.BoolOp) -> Iterator[ast.expr]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _condition_dropped(node: ast.BoolOp) -> Iterator[ast.expr]:
    for i in range(len(node.values)):
        rest = [*node.values[:i], *node.values[i + 1 :]]
        yield ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]


def _not_dropped(node: ast.UnaryOp) -> Iterator[ast.expr]:
    if isinstance(node.op, ast.Not):
        yield node.operand


def _arithmetic(node: ast.BinOp) -> Iterator[ast.expr]:
    if any(isinstance(n, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or _is_text(n) for n in ast.walk(node)):
        return
    match node.op:
        case ast.Add():
            yield ast.BinOp(node.left, ast.Sub(), node.right)
        case ast.Sub():
            yield ast.BinOp(node.left, ast.Add(), node.right)
        case ast.FloorDiv():
            lowered = ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right)
            yield ast.UnaryOp(ast.USub(), lowered)
        case ast.Mult() | ast.Mod():
            yield node.left


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _other_call(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        other = _CALLS[node.func.id]
        keywords = [] if other == "list" else node.keywords
        yield ast.Call(ast.Name(other, ast.Load()), node.args, keywords)


def _arguments_swapped(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Name) and node.func.id in _NO_SWAP:
        return
    for i, (a, b) in enumerate(zip(node.args, node.args[1:], strict=False)):
        simple = isinstance(a, ast.Name | ast.Attribute) and isinstance(b, ast.Name | ast.Attribute)
        if simple and ast.dump(a) != ast.dump(b):
            yield ast.Call(node.func, [*node.args[:i], b, a, *node.args[i + 2 :]], node.keywords)


def _range_shorter(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) < 3 and not node.keywords:
        *before, stop = node.args
        yield ast.Call(node.func, [*before, ast.BinOp(stop, ast.Sub(), ast.Constant(1))], [])


def _number(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)


def _bound_dropped(node: ast.Subscript) -> Iterator[ast.expr]:
    cut = node.slice
    if isinstance(cut, ast.Slice) and isinstance(node.ctx, ast.Load):
        if cut.lower is not None:
            yield ast.Subscript(node.value, ast.Slice(None, cut.upper, cut.step), ast.Load())
        if cut.upper is not None:
            yield ast.Subscript(node.value, ast.Slice(cut.lower, None, cut.step), ast.Load())


def _one_case(node: ast.IfExp) -> Iterator[ast.expr]:
    yield node.body
    yield node.orelse


def _filter_dropped(node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Iterator[ast.expr]:
    for i, part in enumerate(node.generators):
        # A condition that names something is needed for the rest to run at all.
        if part.ifs and not any(isinstance(n, ast.NamedExpr) for test in part.ifs for n in ast.walk(test)):
            new = deepcopy(node)
            new.generators[i].ifs = []
            yield new


def _last_left_out(node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Iterator[ast.expr]:
    new = deepcopy(node)
    new.generators[0].iter = _but_last(new.generators[0].iter)
    yield new


def _guard_dropped(node: ast.If) -> Iterator[list[ast.stmt]]:
    if isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue):
        yield node.orelse


def _always(node: ast.If) -> Iterator[list[ast.stmt]]:
    if not isinstance(node.body[-1], ast.Raise):
        yield node.body


def _last_round_left_out(node: ast.For) -> Iterator[list[ast.stmt]]:
    new = deepcopy(node)
    new.iter = _but_last(new.iter)
    yield [new]


def _call_dropped(node: ast.Expr) -> Iterator[list[ast.stmt]]:
    if isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom):
        yield []


def _assignment_dropped(node: ast.Assign) -> Iterator[list[ast.stmt]]:
    if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
        yield []


def _sum_reversed(node: ast.AugAssign) -> Iterator[list[ast.stmt]]:
    if isinstance(node.op, ast.Add) and not isinstance(node.value, ast.List | ast.JoinedStr):
        yield [ast.AugAssign(node.target, ast.Sub(), node.value)]


def _continue_dropped(node: ast.Continue) -> Iterator[list[ast.stmt]]:
    yield []


def _raise_dropped(node: ast.Raise) -> Iterator[list[ast.stmt]]:
    yield []


def _error_not_caught(node: ast.Try) -> Iterator[list[ast.stmt]]:
    if not node.finalbody:
        yield [*node.body, *node.orelse]


_COMPREHENSIONS = (_filter_dropped, _last_left_out)
_OPERATORS: dict[type[ast.AST], tuple[Callable[..., Iterator[ast.expr | list[ast.stmt]]], ...]] = {
    ast.Compare: (_comparison, _always_member),
    ast.BoolOp: (_and_or, _condition_dropped),
    ast.UnaryOp: (_not_dropped,),
    ast.BinOp: (_arithmetic,),
    ast.Call: (_other_call, _arguments_swapped, _range_shorter),
    ast.Constant: (_number,),
    ast.Subscript: (_bound_dropped,),
    ast.IfExp: (_one_case,),
    ast.ListComp: _COMPREHENSIONS,
    ast.SetComp: _COMPREHENSIONS,
    ast.DictComp: _COMPREHENSIONS,
    ast.GeneratorExp: _COMPREHENSIONS,
    ast.If: (_guard_dropped, _always),
    ast.For: (_last_round_left_out,),
    ast.Expr: (_call_dropped,),
    ast.Assign: (_assignment_dropped,),
    ast.AugAssign: (_sum_reversed,),
    ast.Continue: (_continue_dropped,),
    ast.Raise: (_raise_dropped,),
    ast.Try: (_error_not_caught,),
}
