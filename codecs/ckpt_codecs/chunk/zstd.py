"""zstandard, for general data, and for frames that older versions wrote in the place of Huffman codes."""

import threading
from typing import TYPE_CHECKING

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError

if TYPE_CHECKING:
    import zstandard

_local = threading.local()


def compress(data: Array, level: int) -> bytes:
    """One frame that says how much it holds."""
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(data.data)


def expand(data: Array, size: int) -> bytes:
    """What a frame holds, which must be `size` bytes: nothing is allocated for a frame that says otherwise."""
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
    """One for each thread, since they are not safe to share."""
    import zstandard

    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    made: zstandard.ZstdDecompressor = _local.decompressor
    return made
