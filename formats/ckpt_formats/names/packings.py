"""Packings: how a library stores the matrices of a model's mathematics, as trees that only move elements.

An atom is one matrix or vector of the mathematics, such as `attention.q`. A tree of packings over atoms is a stored
tensor, and holds in both directions: `pack` makes the stored tensor from atoms, `unpack` gives the atoms in one. Every
result is a view: no data is read.

| packing | the stored tensor |
|---|---|
| `by(n, a, b, ...)` | rows in n groups: in each group the rows of a, then those of b |
| `T(a)` | the transposed matrix |
| `each(n, a)` | a stack of n tensors; the name `expert` is the index in the stack |
| `rope(n, a)` | the rows of each of n heads in pairs, one from each half |
| `turned(n, a)` | a stack of n matrices: the rows of each of n heads, transposed |
| `pad(a)` | a table that may have further rows at its end |
| `copy(a)` | a second copy of what is also stored elsewhere |
| `shaped([x, y], a)` | another shape |
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.views import (
    LayersBlob,
    group_rows,
    halves_of_rotary,
    interleaved,
    pairs_of_rotary,
    permuted,
    rows_of,
    transposed,
    unstacked_all,
    with_shape,
)
from ckpt_formats.names.expressions import Expression, InnerScope, Scope, evaluate, expression_of, natural, shown_value

_SIZED = frozenset(["by", "each", "rope", "turned", "shaped"])
_KINDS = _SIZED | {"T", "pad", "copy"}
_MAX_EXPERTS = 1 << 20
_TURNED = (0, 2, 1)
"""The axes of the stack of matrices of which `turned` is the stack of transposed ones, and the other way round."""

ShapeOf = Callable[[str, Scope], Shape]
"""Returns the shape of an atom in a scope."""
TensorOf = Callable[[str, Scope], Tensor]
"""Returns the tensor of an atom in a scope."""


@dataclass(frozen=True)
class Atom:
    """One matrix or vector of a model's mathematics."""

    name: str


@dataclass(frozen=True)
class Packing:
    """A way to store other nodes in one tensor."""

    kind: str
    size: Expression | None
    """The groups of `by`, the tensors of `each`, the heads of `rope` and `turned`, the shape of `shaped`; else None."""
    parts: "tuple[Node, ...]"


Node = Atom | Packing


class _MisfitError(Exception):
    """A tensor has another shape than its place in a tree requires."""


@cache
def parse_packing(text: str) -> Node:
    """Parse a tree of packings. Raises `ValueError` for anything else.

    >>> atoms_of(parse_packing("each(experts, T(by(1, experts.gate, experts.up)))"))
    ('experts.gate', 'experts.up')
    """
    try:
        return _parsed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"`{text}` is not a packing") from error


def atoms_of(node: Node) -> tuple[str, ...]:
    """The names of all atoms of a tree, in its order."""
    return (node.name,) if isinstance(node, Atom) else tuple(name for part in node.parts for name in atoms_of(part))


def stored_shape(node: Node, scope: Scope, shape: ShapeOf) -> Shape:
    """The shape of the stored tensor.

    Raises `CorruptError` for sizes that do not divide a number of rows, or are no sizes.
    """
    if isinstance(node, Atom):
        return shape(node.name, scope)
    if node.kind == "each":
        return (_stack_size(node, scope), *stored_shape(node.parts[0], InnerScope(scope, {"expert": 0}), shape))
    shapes = [stored_shape(part, scope, shape) for part in node.parts]
    if node.kind == "by":
        _groups(node, scope, shapes)
        if any(one[1:] != shapes[0][1:] for one in shapes):
            shown = ", ".join(str(list(one)) for one in shapes)
            raise CorruptError(f"{_names(node)} have the shapes {shown}, which differ in more than their rows")
        return (sum(one[0] for one in shapes), *shapes[0][1:])
    if node.kind == "T":
        if len(shapes[0]) != 2:
            raise CorruptError(f"{_names(node)} has the shape {list(shapes[0])}, which is not that of a matrix")
        return shapes[0][::-1]
    if node.kind == "shaped":
        return _given_shape(node, scope, shapes[0])
    if node.kind == "turned":
        return _turned_shape(node, scope, shapes[0])
    if node.kind == "rope":
        _groups(node, scope, shapes, 2)
    return shapes[0]


def pack(node: Node, scope: Scope, get: TensorOf, shape: ShapeOf) -> Tensor:
    """The stored tensor of a tree over the atoms that `get` returns. A table is stored without rows of padding.

    Raises `CorruptError` for an atom that has not the shape that `shape` returns, for atoms of several dtypes in one
    tensor, and as `stored_shape`.
    """
    stored_shape(node, scope, shape)
    return _packed(node, scope, get, shape)


def unpack(node: Node, tensor: Tensor, scope: Scope, shape: ShapeOf) -> list[tuple[str, Scope, Tensor]]:
    """The atoms in a stored tensor: triples of an atom, its scope and its tensor. Rows of padding are left out.

    Raises `CorruptError` if the tensor has not the stored shape, and as `stored_shape`.
    """
    stored = stored_shape(node, scope, shape)
    try:
        return list(_unpacked(node, tensor, scope, shape))
    except _MisfitError as error:
        raise CorruptError(_shape_message(tensor.shape, stored)) from error


def _packed(node: Node, scope: Scope, get: TensorOf, shape: ShapeOf) -> Tensor:
    if isinstance(node, Atom):
        tensor, wanted = get(node.name, scope), shape(node.name, scope)
        if tensor.shape != wanted:
            raise CorruptError(_shape_message(tensor.shape, wanted), where=node.name)
        return tensor
    if node.kind == "each":
        experts = range(_stack_size(node, scope))
        tensors = [_packed(node.parts[0], InnerScope(scope, {"expert": expert}), get, shape) for expert in experts]
        _check_alike(node, tensors)
        return Tensor.of(LayersBlob((len(tensors),), {(i,): tensor for i, tensor in enumerate(tensors)}))
    tensors = [_packed(part, scope, get, shape) for part in node.parts]
    shapes = [tensor.shape for tensor in tensors]
    if node.kind == "by":
        _check_alike(node, tensors)
        return interleaved(tensors, _groups(node, scope, shapes))
    if node.kind == "T":
        return transposed(tensors[0])
    if node.kind == "shaped":
        return with_shape(tensors[0], _given_shape(node, scope, shapes[0]))
    if node.kind == "rope":
        return pairs_of_rotary(tensors[0], _groups(node, scope, shapes, 2))
    if node.kind == "turned":
        heads, columns, rows = _turned_shape(node, scope, shapes[0])
        return permuted(with_shape(tensors[0], (heads, rows, columns)), _TURNED)
    return tensors[0]


def _unpacked(node: Node, tensor: Tensor, scope: Scope, shape: ShapeOf) -> Iterator[tuple[str, Scope, Tensor]]:
    if isinstance(node, Atom):
        _check_fits(tensor.shape == shape(node.name, scope))
        yield node.name, scope, tensor
    elif node.kind == "each":
        _check_fits(tensor.shape[:1] == (_stack_size(node, scope),))
        for expert, one in enumerate(unstacked_all(tensor)):
            yield from _unpacked(node.parts[0], one, InnerScope(scope, {"expert": expert}), shape)
    elif node.kind == "by":
        shapes = [stored_shape(part, scope, shape) for part in node.parts]
        groups = _groups(node, scope, shapes)
        _check_fits(tensor.shape == (sum(one[0] for one in shapes), *shapes[0][1:]))
        at = 0
        for part, (part_rows, *_) in zip(node.parts, shapes, strict=True):
            rows = part_rows // groups
            yield from _unpacked(part, group_rows(tensor, groups, at, at + rows), scope, shape)
            at += rows
    else:
        yield from _unpacked(node.parts[0], _part_of(node, tensor, scope, shape), scope, shape)


def _part_of(node: Packing, tensor: Tensor, scope: Scope, shape: ShapeOf) -> Tensor:
    """The part of a packing that has one, in its stored tensor."""
    if node.kind == "T":
        _check_fits(len(tensor.shape) == 2)
        return transposed(tensor)
    inner = stored_shape(node.parts[0], scope, shape)
    if node.kind == "pad":
        _check_fits(len(tensor.shape) == len(inner) > 0 and tensor.shape[0] >= inner[0])
        return rows_of(tensor, [(0, inner[0])]) if tensor.shape[0] > inner[0] else tensor
    if node.kind == "shaped":
        _check_fits(tensor.shape == _given_shape(node, scope, inner))
        return with_shape(tensor, inner)
    if node.kind == "rope":
        _check_fits(tensor.shape == inner)
        return halves_of_rotary(tensor, _groups(node, scope, [inner], 2))
    if node.kind == "turned":
        _check_fits(tensor.shape == _turned_shape(node, scope, inner))
        return with_shape(permuted(tensor, _TURNED), inner)
    return tensor


def _groups(node: Packing, scope: Scope, shapes: Sequence[Shape], each: int = 1) -> int:
    """The value of a packing's size. `each`: the equal parts of each group. Raises `CorruptError` if it does not divide
    the rows of all `shapes`."""
    assert node.size is not None
    groups = natural(node.size, scope)
    for part, one in zip(node.parts, shapes, strict=True):
        if not one or not groups or one[0] % (groups * each):
            parts = f"{groups} groups" if each == 1 else f"{groups} heads of {each} halves"
            rows = f"{one[0]} rows" if one else "no rows"
            raise CorruptError(f"{_names(part)} has {rows}, which cannot be divided into `{node.size.text}` = {parts}")
    return groups


def _stack_size(node: Packing, scope: Scope) -> int:
    assert node.size is not None
    size = natural(node.size, scope)
    if not 0 < size <= _MAX_EXPERTS:
        raise CorruptError(f"`{node.size.text}` is {size}: a stack has 1 to {_MAX_EXPERTS:,} tensors")
    return size


def _given_shape(node: Packing, scope: Scope, inner: Shape) -> Shape:
    """The shape that `shaped` states. Raises `CorruptError` if it has not as many elements as `inner`."""
    assert node.size is not None
    value = evaluate(node.size, scope)
    lengths = value if isinstance(value, (list, tuple)) else [value]
    shape = tuple(length for length in lengths if type(length) is int and length >= 0)
    if len(shape) != len(lengths) or prod(shape) != prod(inner):
        shown = ", ".join(map(shown_value, lengths))
        raise CorruptError(f"{_names(node)} has the shape {list(inner)}, which cannot be reshaped to [{shown}]")
    return shape


def _turned_shape(node: Packing, scope: Scope, inner: Shape) -> Shape:
    """The shape of `turned`: (heads, columns, rows of a head). Raises `CorruptError` for what is not a matrix."""
    if len(inner) != 2:
        raise CorruptError(f"{_names(node)} has the shape {list(inner)}, which is not that of a matrix")
    heads = _groups(node, scope, [inner])
    return (heads, inner[1], inner[0] // heads)


def _check_fits(fits: bool) -> None:
    if not fits:
        raise _MisfitError


def _check_alike(node: Packing, tensors: Sequence[Tensor]) -> None:
    """Raise `CorruptError` for parts of several types, and for tensors of several shapes in a stack."""
    kinds = list(dict.fromkeys(tensor.dtype.name for tensor in tensors))
    if node.kind == "each" and len(kinds) == 1:
        kinds = list(dict.fromkeys(str(list(tensor.shape)) for tensor in tensors))
    if len(kinds) > 1:
        shown = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
        raise CorruptError(f"{_names(node)}: tensors of {shown} are to be stored in one tensor")


def _shape_message(actual: Shape, wanted: Shape) -> str:
    return f"has the shape {list(actual)}, but the model's sizes give {list(wanted)}"


def _names(node: Node) -> str:
    return ", ".join(atoms_of(node))


def _parsed(node: ast.expr) -> Node:
    if isinstance(node, (ast.Name, ast.Attribute)):
        return Atom(_dotted(node))
    kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
    if not isinstance(node, ast.Call) or kind not in _KINDS or node.keywords:
        raise ValueError(f"`{ast.unparse(node)}` is not a packing")
    arguments = list(node.args)
    size = expression_of(arguments.pop(0)) if kind in _SIZED and arguments else None
    if not arguments or (len(arguments) > 1 and kind != "by"):
        raise ValueError(f"`{ast.unparse(node)}`: `{kind}` has another number of parts")
    return Packing(kind, size, tuple(map(_parsed, arguments)))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError(f"`{ast.unparse(node)}` is not the name of an atom")
    return node.id
