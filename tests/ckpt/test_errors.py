"""Errors are Python's own kinds too, and code that turns errors of the system into ours leaves ours as they are."""

import ast
import errno
import pickle
from pathlib import Path

import pytest

import ckpt
import ckpt.errors
from ckpt.chains.change import change
from ckpt.pipeline import Execution
from ckpt_cli.options.exit_codes import EXIT_CODES, KINDS, exit_code
from ckpt_formats.core.errors import form_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for room in ("formats", "ckpt_cli") for path in sorted((ROOT / room).rglob("*.py"))]
SYSTEM = {"OSError", "FileNotFoundError", "IOError", "EnvironmentError"}


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ckpt.InvalidArgumentError, ValueError),
        (ckpt.errors.NoMatchError, LookupError),
        (ckpt.NotFoundError, FileNotFoundError),
    ],
)
def test_error_is_also_the_kind_that_python_has(kind: type[ckpt.CkptError], base: type[Exception]) -> None:
    error = kind("nothing is here", where="run", hint="Name another.")
    copied = pickle.loads(pickle.dumps(error))
    assert isinstance(copied, base)
    assert (copied.what, copied.where, copied.hint) == ("nothing is here", "run", "Name another.")
    assert str(copied) == "run: nothing is here"


def test_open_raises_file_not_found_with_errno_and_filename(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ckpt.open(tmp_path / "nothing")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "nothing"))


def test_errors_module_has_all_errors_and_the_top_has_some() -> None:
    kinds = {name for name in dir(ckpt.errors) if name.endswith("Error")}
    top = {name for name in ckpt.__all__ if name.endswith("Error")}
    assert kinds == set(ckpt.errors.__all__) > top
    assert all(getattr(ckpt, name) is getattr(ckpt.errors, name) for name in top)


def test_every_error_has_an_exit_code_and_a_kind_in_json() -> None:
    kinds = [getattr(ckpt.errors, name) for name in ckpt.errors.__all__ if name != "CkptError"]
    assert set(EXIT_CODES) == set(KINDS) == set(kinds)
    codes = {kind.__name__: exit_code(kind("what")) for kind in kinds}
    assert (codes["InvalidArgumentError"], codes["NoMatchError"], codes["NotFoundError"]) == (2, 10, 10)


def test_chain_lock_leaves_an_error_within_as_it_is(tmp_path: Path) -> None:
    with (
        pytest.raises(ckpt.NotFoundError, match="a parent is gone"),
        change(tmp_path / "run", Execution(), create=True),
    ):
        raise ckpt.NotFoundError("a parent is gone")


def test_form_of_leaves_our_errors_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ckpt.errors.NoMatchError), form_of("a tree", tmp_path):
        raise ckpt.errors.NoMatchError("no such state")


def _caught(handler: ast.ExceptHandler) -> set[str]:
    return {one.id for one in ast.walk(handler.type) if isinstance(one, ast.Name)} if handler.type else set()


def _calls(nodes: list[ast.stmt]) -> set[str]:
    calls = [one.func for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}


def test_handlers_of_system_errors_let_ours_pass() -> None:
    """`NotFoundError` is an `OSError`: where it may be raised, `except OSError` comes after `except CkptError`."""
    texts = {path: path.read_text("utf-8") for path in SOURCES}
    concerned = {path: text for path, text in texts.items() if any(name in text for name in ("NotFoundError", *SYSTEM))}
    trees = {path: ast.parse(text) for path, text in concerned.items()}
    raising = {"open_regular", "open_to_read"}
    for tree in trees.values():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                raised = [one.exc for one in ast.walk(function) if isinstance(one, ast.Raise) and one.exc is not None]
                if any("NotFoundError" in ast.unparse(one) for one in raised):
                    raising.add(function.name)
    raising -= {"read", "_read", "list", "_check", "__enter__", "__exit__", "stat", "sum"}  # others, too
    wrong = []
    for path, tree in trees.items():
        if "stores" in path.parts or "ckpt_cli" in path.parts:
            continue  # there `NotFoundError` is the store library's; `main` ends with both
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and _calls(node.body) & raising:
                kinds = [_caught(handler) for handler in node.handlers]
                system = [i for i, kind in enumerate(kinds) if kind & SYSTEM]
                ours = [i for i, kind in enumerate(kinds) if kind & {"CkptError", "NotFoundError"}]
                if system and (not ours or ours[0] > system[0]):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {_calls(node.body) & raising}")
    assert not wrong, "\n".join(wrong)
