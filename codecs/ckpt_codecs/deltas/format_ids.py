"""Numbers that stand in files. They never change their meaning: docs/delta-codecs.md."""

PARTS = 1
"""The first byte of a chunk: a part for each state."""

# What foretells a state: the first byte of its part.
NOTHING = 0
BEFORE = 1
REPLAYED = 2
GRADIENT = 3
FADED = 4
CARRIED = 5
DRIFTED = 6
ROUNDED = 7

# How far the state is from that: the first byte of its residuals. Up to 8, it is the number of planes.
GRID = 16
BUCKETS = 17
RARE = 18
"""These two were written by version 0.3.0, and are read."""
CHANGES = 19
TABLES = 20

# Where the units of a grid come from.
CONSTANT_UNIT = 0
ROOT_BEFORE = 1
ROOT_AFTER = 2
"""The root of `exp_avg_sq`, before or after the step."""
UNIT_SOURCES = 3
GROWTH_CONTEXTS = 8
"""Contexts of symbols, told from how much `exp_avg_sq` has grown."""
MOST_BUCKETS = 16
