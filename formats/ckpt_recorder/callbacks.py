"""What callbacks of trainers inherit from: a trainer's own class, if it is installed."""

from importlib import import_module
from typing import Any


def installed(*places: str) -> type[Any]:
    """The first class of these that is installed; `object` if none is."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            callback: type[Any] = getattr(import_module(module), name)
        except ImportError:
            continue
        return callback
    return object
