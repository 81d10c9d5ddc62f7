"""The public names of the library: each documented, each in an example that runs, and typed for users."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import ckpt
from public_names import NAMESPACES, PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```(python|ipython)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
"""All are executed: by `test_library.py`, and by `test_notebook.py` those of notebooks."""
SOURCES = (ROOT / "formats", ROOT / "codecs", ROOT)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_and_an_example(name: str) -> None:
    thing = PUBLIC[name]
    text = vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
    assert text, "no docstring of its own"
    assert not text.startswith(f"{thing.__name__}("), "dataclass wrote it"
    assert any(re.search(rf"\bckpt\.{re.escape(name)}\b", code) for _, code in EXAMPLES), (
        "in no example of docs/library.md"
    )


def test_top_of_the_library_has_at_most_63_names() -> None:
    assert len(ckpt.__all__) <= 63
    assert NAMESPACES.keys() == {"errors", "ext", "partial", "planning", "runs", "types"}
    for space in NAMESPACES.values():
        assert space.__doc__
        assert sorted(space.__all__) == sorted(set(space.__all__))


@pytest.mark.parametrize(
    "package", ["ckpt", "ckpt_formats", "ckpt_codecs", "ckpt_recorder", "ckpt_serving", "ckpt_training", "ckpt_cli"]
)
def test_every_package_says_that_it_is_typed(package: str) -> None:
    (marker,) = (
        path for path in (ROOT / "formats", ROOT / "codecs", ROOT) if (path / package / "__init__.py").exists()
    )
    assert (marker / package / "py.typed").exists()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All examples of the page as the script of a user."""
    path = tmp_path_factory.mktemp("user") / "script.py"
    path.write_text("\n".join(code for kind, code in EXAMPLES if kind == "python"), "utf-8")
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the library as installed packages: type checkers see no import hooks of an editable one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "user.pth").write_text("\n".join(map(str, (*SOURCES, *site.getsitepackages(), *shared_folders()))))
    return str(folder / "bin" / "python")


def shared_folders() -> list[str]:
    """Further folders of packages of this environment."""
    return [path for path in sys.path if path.endswith("site-packages")]


@pytest.mark.slow
def test_the_examples_are_clean_for_mypy(script: Path, python: str) -> None:
    """Slow: mypy reads the library; torch and all else that did not change, only if `make lint` has not read it."""
    cache, lint = ROOT / ".mypy_cache" / "user", ROOT / ".mypy_cache" / "{}.{}".format(*sys.version_info)
    if lint.exists() and not cache.exists():
        shutil.copytree(lint, script.parent / "cache" / lint.name)
        shutil.move(script.parent / "cache", cache)
    options = ["--strict", "--cache-dir", str(cache), "--python-executable", python]
    done = run(["mypy", *options, str(script)], script.parent)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_examples_are_clean_for_pyright(script: Path, python: str) -> None:
    """Slow: pyright reads the library."""
    if shutil.which("node") is None:
        reason = "NOT TESTED: pyright needs node, which is not on the path"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    (script.parent / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    wrong = script.with_name("wrong.py")  # one run for both: pyright reads the library and torch in ten seconds
    wrong.write_text("import ckpt\n\nckpt.open(1)\n")
    done = run(["pyright", "--pythonpath", python, "--outputjson", "-p", "."], script.parent)
    wrong.unlink()
    findings = json.loads(done.stdout)["generalDiagnostics"]
    assert [one for one in findings if Path(one["file"]) != wrong] == []
    assert [one["rule"] for one in findings] == ["reportArgumentType"]  # it knows the library


def run(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)
