"""CRC-32C of bytes (Castagnoli's polynomial), which OCDBT and zarr use, computed by NumPy.

A CRC is linear over GF(2): the bytes are split into lanes, all lanes advance together byte after byte, and their CRCs
are then joined in pairs. `checksums` has CRC-32, whose polynomial is another one and which a library computes.
"""

from functools import cache
from typing import Any

import numpy as np

_Words = np.ndarray[Any, np.dtype[np.uint32]]

_POLYNOMIAL = 0x82F63B78
_LANE, _MAX_LANES = 64, 8192


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of bytes, as an unsigned number of 32 bits."""
    message = np.frombuffer(data, np.uint8)
    if message.size < 4:
        return _of_few(message)
    nbytes = min(message.size, _LANE * _MAX_LANES)
    count = 1 << max(0, (-(-nbytes // _LANE) - 1).bit_length())
    length = -(-message.size // count)
    padded = np.zeros(count * length, np.uint8)  # zeros before the message change nothing, since the CRC begins with 0
    padded[-message.size :] = message
    padded[-message.size :][:4] ^= 0xFF
    columns = np.ascontiguousarray(padded.reshape(count, length).T)
    words = np.zeros(count, np.uint32)
    table = _table()
    for column in columns:
        words = table[(words ^ column) & 0xFF] ^ (words >> np.uint32(8))
    while words.size > 1:
        words = _applied(_zeros(length), words[::2]) ^ words[1::2]
        length *= 2
    return int(words[0]) ^ 0xFFFFFFFF


def _of_few(message: Any) -> int:
    table, word = _table(), 0xFFFFFFFF
    for byte in message.tolist():
        word = int(table[(word ^ byte) & 0xFF]) ^ (word >> 8)
    return word ^ 0xFFFFFFFF


@cache
def _table() -> _Words:
    """The CRC of each byte: (256,) uint32."""
    words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        words = (words >> np.uint32(1)) ^ np.where(words & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return words


@cache
def _zeros(count: int) -> _Words:
    """What `count` zero bytes make of each bit of a CRC: (32,) uint32, the columns of a matrix over GF(2)."""
    if count == 1:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        shifted: _Words = _table()[bits & 0xFF] ^ (bits >> np.uint32(8))
        return shifted
    half = _zeros(count // 2)
    both = _applied(half, half)
    return _applied(_zeros(1), both) if count % 2 else both


def _applied(columns: _Words, words: _Words) -> _Words:
    """The product of a matrix and of each word: words is (n,) uint32."""
    result = np.zeros_like(words)
    for bit in range(32):
        result ^= np.where((words >> np.uint32(bit)) & 1, columns[bit], np.uint32(0))
    return result
