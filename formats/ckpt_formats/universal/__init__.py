"""The universal format: states in packs, which are safetensors files, an index, and a manifest. See docs/format.md.

The format is imported at the first use of its names: the list of a chain needs neither packs nor codecs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_formats.universal.format import PACK_NBYTES, DeltaContent, PackContent, Universal

__all__ = ["PACK_NBYTES", "DeltaContent", "PackContent", "Universal"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ckpt_formats.universal' has no attribute {name!r}")
    from ckpt_formats.universal import format

    globals()[name] = value = getattr(format, name)
    return value
