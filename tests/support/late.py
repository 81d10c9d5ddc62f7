"""A module that is imported when a test first asks for something in it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """Stands for a module that takes seconds to import: those who collect its tests, and run others, do without."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks and wrappers in all that a file of tests has
            raise AttributeError(attribute)
        if find_spec(self._name) is None:
            pytest.skip(f"{self._name} is not installed")
        return getattr(import_module(self._name), attribute)  # an error of its own modules is none to skip for
