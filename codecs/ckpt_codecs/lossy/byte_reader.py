"""How the pieces of a lossy chunk follow one another: each with its length before it."""

from ckpt_codecs.errors import CodecError


class ByteReader:
    """Reads pieces, one after another. Raises `CodecError` where there is none."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise CodecError("a lossy chunk ends too early")
        length_prefixed, self._at = self._data[self._at : end], end
        return length_prefixed

    def piece(self) -> bytes:
        """One that `length_prefixed` wrote."""
        size = shift = 0
        while True:
            (byte,) = self.take(1)
            size |= (byte & 127) << shift
            if byte < 128:
                return self.take(size)
            shift += 7
            if shift > 35:
                raise CodecError("a lossy chunk has a piece without end")

    def end(self) -> None:
        if self._at != len(self._data):
            raise CodecError("a lossy chunk goes on past its end")


def length_prefixed(data: bytes) -> bytes:
    """A piece with its length before it: seven bits a byte, the lowest first."""
    size, head = len(data), bytearray()
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + data
