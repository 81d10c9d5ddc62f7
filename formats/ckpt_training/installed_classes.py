"""The base classes of callbacks: a trainer's own class, if it is installed."""

from importlib import import_module
from typing import Any


def installed_class(*class_paths: str) -> type[Any]:
    """The first of these classes (`module:name`) that is installed; `object` if none is."""
    for class_path in class_paths:
        module, _, name = class_path.partition(":")
        try:
            callback: type[Any] = getattr(import_module(module), name)
        except ImportError:
            continue
        return callback
    return object
