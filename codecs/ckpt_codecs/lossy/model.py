"""Numbers of the format: the contexts of the coder of symbols, and how quickly its probabilities follow."""

import numpy as np

GROUP = 8
"""Neighbours in a row that one decision can tell to be zero."""
CONTEXTS = 20
UNARY = 14
"""Magnitudes up to this are counted out; of larger ones the rest is an Exp-Golomb code."""
ANY, ZERO, MORE = 0, CONTEXTS, 2 * CONTEXTS
"""Where the probabilities begin: is there any in the group, is this one not zero, is it more."""
PROBABILITIES = 2 * CONTEXTS + CONTEXTS * UNARY
HALF, LEAST = 1 << 14, 32
FAST, SLOW = 4, 7
MOST_SEEN = 8
SEEN = 12
"""Bits after the point of the averages of magnitudes, which are cut at `MOST_SEEN`."""
LONGEST = 30
"""Bits of an Exp-Golomb code's rest."""
LOWEST = 1 << 16
"""The state of the range coder lies from here to 2^32."""

NOTHING = 1e-200
"""Squares of lengths up to which a vector has no direction."""
LOW, HIGH = -149 * 8, 128 * 8 - 1
"""Levels, eighths of an octave: from the least denormal to the largest finite float32."""
LEVEL_OF_ONE = 127 * 8
"""What the upper twelve bits of 1 are: levels are counted from there."""
FINE = 2.0**-20
"""The encoder's measure of parts of a level."""
CAP, TINY = 16.0, 1e-30
"""Of the direction of the last change: the bound, and second moments that tell nothing."""
CENTRED = 3
"""Magnitudes up to this are given back as the mean of what they stand for; others as they are."""
LARGEST = 1 << 30
"""Magnitudes are below this."""

_STEPS = (
    40,
    64,
    104,
    160,
    256,
    408,
    648,
    1024,
    1624,
    2584,
    4096,
    6504,
    10320,
    16384,
    22000,
    30000,
    38000,
    46000,
    56000,
)
"""Sums of averages from which the next context begins: 1.5 of them for each octave, then wider ones."""


def context_table() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The context for each eighth of the sum of two averages."""
    return np.searchsorted(np.array(_STEPS), np.arange((2 * MOST_SEEN << SEEN) // 8 + 1) * 8, "right").astype(np.uint8)
