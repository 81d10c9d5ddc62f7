"""Examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    ".".join(path.relative_to(root).with_suffix("").parts)
    for root, package in ((ROOT, "ckpt_cli"), (ROOT / "formats", "ckpt_formats"), (ROOT / "codecs", "ckpt_codecs"))
    for path in sorted((root / package).rglob("*.py"))
    if ">>>" in path.read_text("utf-8")
]
"""Those that have examples: to import the others would compile nothing, but take a minute."""


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_hold(module: str) -> None:
    failures, examples = doctest.testmod(importlib.import_module(module))
    assert examples > 0
    assert failures == 0
