"""The frame of a lossy chunk: parts of bytes, each after its length."""

from ckpt_codecs.errors import CodecError


class ByteReader:
    """Reads bytes and parts from the start of `data` on. Raises `CodecError` where they are missing."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self._at + size
        if end > len(self._data):
            raise CodecError("a lossy chunk ends too early")
        content, self._at = self._data[self._at : end], end
        return content

    def part(self) -> bytes:
        """The next part that `length_prefixed` wrote."""
        size = shift = 0
        while True:
            (byte,) = self.take(1)
            size |= (byte & 127) << shift
            if byte < 128:
                return self.take(size)
            shift += 7
            if shift > 35:
                raise CodecError("the length of a part of a lossy chunk has too many bytes")

    def end(self) -> None:
        """Raise `CodecError` unless all bytes are read."""
        if self._at != len(self._data):
            raise CodecError("a lossy chunk has bytes after its end")


def length_prefixed(data: bytes) -> bytes:
    """The data after its length, which has seven bits in each byte, the lowest first."""
    size, head = len(data), bytearray()
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + data
