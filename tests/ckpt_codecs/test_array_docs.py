"""Every public function that takes or returns arrays names their shapes and dtypes in its docstring."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "codecs" / "ckpt_codecs", ROOT / "formats" / "ckpt_formats", ROOT / "formats" / "ckpt"]

ARRAYS = re.compile(r"\b(Array|ndarray)\b")
SHAPE = re.compile(
    r"\([a-z0-9_*+ .\[\]]+,[^)]*\)|\((size|shape)\)|\b(any|one|this|same|chunk's) shapes?\b", re.IGNORECASE
)
DTYPE = re.compile(r"\b(uint(8|16|32|64)?|int(8|16|32|64)|b?float(16|32|64)|dtypes?)\b")
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    return [
        path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if ARRAYS.search(path.read_text("utf-8"))
    ]


def functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Yield the public functions of a module, and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield None, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, Function) and (not inner.name.startswith("_") or inner.name == "__init__"):
                    yield node, inner


def has_arrays(function: Function) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [one.annotation for one in every if one is not None] + [function.returns]
    return any(one is not None and ARRAYS.search(ast.unparse(one)) for one in annotations)


@cache
def paths_of_classes() -> dict[str, Path]:
    """The module of each class, by its name."""
    every = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    return {name: path for path in every for name in CLASS.findall(path.read_text("utf-8"))}


@cache
def class_named(name: str) -> ast.ClassDef | None:
    path = paths_of_classes().get(name)
    nodes = ast.parse(path.read_text("utf-8")).body if path else []
    return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)


def docstring(owner: ast.ClassDef | None, function: Function) -> str:
    """Return the docstring of a function: of a method without one, that of the method which it overrides."""
    text = ast.get_docstring(function)
    if text is not None or owner is None:
        return text or ""
    for base in owner.bases:
        parent = class_named(ast.unparse(base))
        if parent is None:
            continue
        for inner in parent.body:
            if isinstance(inner, Function) and inner.name == function.name and ast.get_docstring(inner):
                return docstring(parent, inner)
        if inherited := docstring(parent, function):
            return inherited
    return ""


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_of_arrays_name_shapes_and_dtypes(path: Path) -> None:
    bad = []
    for owner, function in functions(ast.parse(path.read_text("utf-8"))):
        text = docstring(owner, function)
        if has_arrays(function) and not (SHAPE.search(text) and DTYPE.search(text)):
            bad.append(f"{path.name}:{function.lineno} {function.name}")
    assert not bad
