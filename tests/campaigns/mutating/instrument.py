"""Modules with all their faults, each behind a switch: `a < b` becomes `a <= b if __ckpt_fault__(7) else a < b`."""

import ast
import marshal
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from mutating.faults import Fault


def write_modules(faults: Sequence[Fault], folder: Path) -> None:
    """Compile every module that has faults, for `fault_switch` to load. Their numbers are their places in `faults`."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, list[int]] = {}
    for number, fault in enumerate(faults):
        numbers.setdefault(fault.module, []).append(number)
    for module, of_module in numbers.items():
        path = faults[of_module[0]].file
        tree = ast.parse(path.read_text())
        switches = _Switches({n: faults[n] for n in of_module})
        tree = ast.fix_missing_locations(switches.visit(tree))
        if switches.left:
            raise ValueError(f"{module}: no place for {[faults[n].key for n in switches.left]}")
        code = compile(tree, str(path), "exec", dont_inherit=True)
        (folder / f"{module}.code").write_bytes(marshal.dumps((str(path), code)))


class _Switches(ast.NodeTransformer):
    """Puts a switch around each node that a fault changes, known by its place in the source and its kind."""

    def __init__(self, faults: dict[int, Fault]) -> None:
        self.left = dict(faults)

    def visit(self, node: ast.AST) -> ast.AST:
        here = [n for n, fault in self.left.items() if _place(fault.change.node) == _place(node)]
        faults = {n: self.left.pop(n) for n in here}
        new = super().visit(node)
        for number, fault in faults.items():
            test = ast.Call(ast.Name("__ckpt_fault__", ast.Load()), [ast.Constant(number)], [])
            instead = deepcopy(fault.change.instead)
            if isinstance(instead, list):
                assert isinstance(new, ast.stmt)
                new = ast.copy_location(ast.If(test, instead or [ast.Pass()], [new]), node)
            else:
                assert isinstance(new, ast.expr)
                new = ast.copy_location(ast.IfExp(test, instead, new), node)
        return new


def _place(node: ast.AST) -> tuple[object, ...] | None:
    if not isinstance(node, ast.stmt | ast.expr):
        return None
    return type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
