"""Frames of zstandard."""

import threading
from typing import TYPE_CHECKING

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError

if TYPE_CHECKING:
    import zstandard

_local = threading.local()


def compress(data: Array, level: int) -> bytes:
    """Return a frame of `data`, (n,) uint8, which states its content size."""
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(data.data)


def decompress(data: Array, size: int) -> bytes:
    """Return the content of a frame, `data`: (n,) uint8. Nothing is allocated for a frame that states another size.

    Raises:
        CodecError: The frame is damaged, or its content has not `size` bytes.
    """
    import zstandard

    try:
        if zstandard.frame_content_size(data.data) != size:
            raise CodecError(f"a frame of zstd does not hold {size} bytes")
        if not size:
            return b""
        return _decompressor().decompress(data.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from None


def _decompressor() -> "zstandard.ZstdDecompressor":
    """Return this thread's decompressor: threads cannot share one."""
    import zstandard

    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
