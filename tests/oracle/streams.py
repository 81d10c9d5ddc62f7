"""The twin of `streams.c`: how the stream of a plane is held."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.format_ids import CONSTANT, DIGITS, HUFFMAN, PACKED7, RUNS, STORED
from oracle.entropy import entropy_of, estimate_bits
from oracle.huffman import code_of, read_huffman, write_huffman
from oracle.planes import all_below_128, pack7, unpack7
from oracle.sparse import read_digits, read_runs, write_sparse

CODE_OVERHEAD = 40
MIN_SPARSE_SIZE = 2048
MAX_SPARSE_BITS = 1.6
MIN_SPARSE_WASTE = 1.03


def write_stream(plane: Array, max_ratio: float, sampled: bool) -> tuple[int, bytes]:
    """Its kind, and its bytes."""
    size = plane.size
    if not size:
        return STORED, b""
    bits = estimate_bits(plane) if sampled else 0.0
    seven_bits = 5 < bits < 7.01 and all_below_128(plane)
    max_size = int((size - size // 8 if seven_bits else size) * max_ratio)
    if size * bits / 8 + CODE_OVERHEAD < max_size:
        code = code_of(plane)
        if code.used == 1:
            return CONSTANT, plane[:1].tobytes()
        total = entropy_of(code.counts.sum(axis=0))
        is_small = size >= MIN_SPARSE_SIZE and 8 * code.size < MAX_SPARSE_BITS * size
        sparse = write_sparse(plane, code.size) if is_small and code.size > MIN_SPARSE_WASTE * total / 8 else None
        if sparse is not None:
            return sparse
        if code.size < max_size:
            return HUFFMAN, write_huffman(plane, code)
    if size >= 8 and (seven_bits or (bits == 0 and all_below_128(plane))):
        return PACKED7, pack7(plane).tobytes()
    return STORED, plane.tobytes()


def read_stream(kind: int, source: Array, plane: Array) -> bool:
    """Fill a plane; False if the stream is damaged."""
    if kind == STORED:
        if source.size != plane.size:
            return False
        plane[:] = source
    elif kind == CONSTANT:
        if source.size != 1:
            return False
        plane[:] = np.uint8(source[0])
    elif kind == PACKED7:
        if source.size != plane.size - plane.size // 8:
            return False
        unpack7(source, plane)
    elif kind == HUFFMAN:
        return read_huffman(source, plane)
    elif kind == RUNS:
        return read_runs(source, plane, read_stream)
    elif kind == DIGITS:
        return read_digits(source, plane, read_stream)
    else:
        return False
    return True
