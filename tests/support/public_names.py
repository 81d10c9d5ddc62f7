"""The public names of the library: those at the top, and those of its namespaces."""

from types import ModuleType
from typing import Any

import ckpt

NAMESPACES: dict[str, ModuleType] = {
    name: getattr(ckpt, name) for name in ckpt.__all__ if isinstance(getattr(ckpt, name), ModuleType)
}
PUBLIC: dict[str, Any] = {
    **{name: getattr(ckpt, name) for name in ckpt.__all__ if name not in NAMESPACES},
    **{
        f"{space}.{name}": getattr(module, name)
        for space, module in NAMESPACES.items()
        if space != "ext"  # for authors of formats: docs/adding-a-format.md
        for name in module.__all__
        if name not in ckpt.__all__  # errors that are at the top, too
    },
}
"""By the name after `ckpt.`."""
