"""The numbers of chunk modes and stream kinds in files. A number never changes its meaning: docs/codecs.md."""

# The kind of a stream.
STORED = 0
CONSTANT = 1
PACKED7 = 2
HUFFMAN = 3
RUNS = 4
DIGITS = 5

ENTRY = 5
"""Bytes of a chunk's directory per stream: 1 for the kind, 4 for the size."""

# The mode of a chunk: its first byte.
RAW = 0
SAME_VALUE = 1
ZSTD = 2
FLOAT_PLANES = 3
ROWS_AND_CONTEXT = 4
ROWS_ONLY = 5
BYTE_PLANES = 6
ZIGZAG_PLANES = 7
# Modes of chunks of gradients.
MULTIPLES = 8
SPARSE = 9
BLOCKS = 10
MAGNITUDES = 11
COLUMNS = 12
