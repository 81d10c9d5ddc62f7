"""Numbers that stand in files. They never change their meaning: docs/codecs.md."""

# How a stream of bytes is held.
STORED = 0
CONSTANT = 1
PACKED7 = 2
HUFFMAN = 3
HUF0 = 4
RUNS = 5
DIGITS = 6

ENTRY = 5
"""Bytes of a chunk's directory for each stream: its kind, and its size in 4 bytes."""

# How a chunk is held: its first byte.
RAW = 0
SAME_VALUE = 1
ZSTD = 2
FLOAT_PLANES = 3
ROWS_AND_CONTEXT = 4
ROWS_ONLY = 5
BYTE_PLANES = 6
ZIGZAG_PLANES = 7
# Of chunks of gradients alone.
MULTIPLES = 8
SPARSE = 9
BLOCKS = 10
MAGNITUDES = 11
