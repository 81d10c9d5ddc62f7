"""Which faults are seeded. They are chosen by hash: the same code gives the same, and a change moves few of them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path

import tomllib

from mutating.operators import Change, Node, changes

ROOT = Path(__file__).parents[3]
_PACKAGES = {
    "ckpt_cli": ROOT,
    "ckpt": ROOT / "formats",
    "ckpt_formats": ROOT / "formats",
    "ckpt_codecs": ROOT / "codecs",
}
_WORDS = {"Notice", "echo", "print", "warn", "note", "say"}
"""Calls whose arguments are words for people."""
_LEAST = "arguments_swapped"
"""Mostly an error of types, which any test sees: chosen where nothing else can be wrong."""
_SPARES = 4
_SKIPPED_FUNCTIONS = {"__repr__", "__str__", "__hash__"}


@dataclass(frozen=True)
class Fault:
    """One change of one function. `key` says which, also after lines above it have moved."""

    area: str
    module: str
    file: Path
    function: str
    change: Change = field(compare=False)
    twin: int = 0
    """How many changes with the same text come before this one in the function."""

    @property
    def key(self) -> str:
        return f"{self.module}:{self.function}: {self.change.text}" + (f" #{self.twin}" if self.twin else "")

    @property
    def line(self) -> int:
        return self.change.node.lineno

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def choose(areas: Mapping[str, tuple[int, Sequence[str]]], seed: str) -> list[list[Fault]]:
    """So many functions of each area, evenly over its modules, each with its fault.

    After the fault come a few others of the same function, to be taken if it is no fault at all.
    """
    return [faults for area, (number, globs) in areas.items() for faults in _of_area(area, number, globs, seed)]


def equivalents(path: Path) -> dict[str, str]:
    """Changes that change nothing which a test should see, each with the reason."""
    return {entry["change"]: entry["reason"] for entry in tomllib.loads(path.read_text()).get("equivalent", [])}


def module_files(globs: Sequence[str]) -> dict[str, Path]:
    """Modules by name. A glob is a path from its package's folder: `ckpt_formats/dcp/*.py`; with `!` it takes out."""
    files: dict[str, Path] = {}
    for glob in globs:
        base = _PACKAGES[glob.lstrip("!").split("/")[0]]
        for path in sorted(base.glob(glob.lstrip("!"))):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if glob.startswith("!"):
                files.pop(name, None)
            else:
                files[name] = path
    return files


def _of_area(area: str, number: int, globs: Sequence[str], seed: str) -> Iterator[list[Fault]]:
    queues = []
    for name, path in module_files(globs).items():
        functions = _functions(area, name, path)
        queues.append(sorted(functions, key=lambda faults: _rank(seed, faults[0].module, faults[0].function)))
    queues = sorted(filter(None, queues), key=lambda queue: _rank(seed, queue[0][0].module))
    taken = 0
    for round_ in count():
        left = [queue[round_] for queue in queues if round_ < len(queue)]
        if not left:
            return
        for faults in left:
            yield _pick(faults, seed)
            taken += 1
            if taken == number:
                return


def _pick(faults: Sequence[Fault], seed: str) -> list[Fault]:
    """A few of a function's: first which operator, then where, so that numerous ones do not win."""

    def order(fault: Fault) -> tuple[bool, bytes, bytes]:
        operator = fault.change.operator
        return operator == _LEAST, _rank(seed, fault.module, fault.function, operator), _rank(seed, fault.key)

    return sorted(faults, key=order)[:_SPARES]


def _rank(*words: str) -> bytes:
    return sha256("\0".join(words).encode()).digest()


def _functions(area: str, module: str, path: Path) -> Iterator[list[Fault]]:
    """The possible faults of each function."""
    tree = ast.parse(path.read_text())
    for name, function in _definitions(tree, ""):
        faults: dict[str, Fault] = {}
        for node in _nodes(function.body):
            for change in changes(node):
                twin = next(n for n in count() if Fault(area, module, path, name, change, n).key not in faults)
                fault = Fault(area, module, path, name, change, twin)
                faults[fault.key] = fault
        if faults:
            yield list(faults.values())


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods, each with those defined inside it as part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef) and child.name not in _SKIPPED_FUNCTIONS:
            yield f"{prefix}{child.name}", child


def _nodes(body: Sequence[ast.AST]) -> Iterator[Node]:
    """All nodes of a function's body at which something could be wrong."""
    for node in body:
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        yield from _nodes(_inside(node))


def _inside(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.Slice():
            return []
        case ast.FunctionDef():
            return list(node.body)
        case ast.Lambda():
            return [node.body]
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _WORDS:
            return []
        case ast.Match():
            return [node.subject, *(n for case in node.cases for n in (case.guard, *case.body) if n is not None)]
        case ast.Try():
            return [*node.body, *(n for h in node.handlers for n in h.body), *node.orelse, *node.finalbody]
        case ast.keyword(arg="strict" | "hint" | "where"):
            return []
        case ast.Subscript() if not isinstance(node.slice, ast.Slice | ast.Constant):
            return [node.value, node.slice]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return []
    return list(ast.iter_child_nodes(node))
