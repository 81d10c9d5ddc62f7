"""The numbers of delta chunks in files. A number never changes its meaning: docs/delta-codecs.md."""

# The first byte of a chunk.
PARTS = 1
"""It has a part for each state."""
CHANGED_ROWS = 2
"""It says which rows changed, and has a chunk of these."""

# From what a state is predicted: the first byte of its part.
UNPREDICTED = 0
UNCHANGED = 1
OPTIMIZER_STEP = 2
GRADIENT = 3
DECAYED = 4
EXTRAPOLATED = 5
DRIFTED = 6
ROUNDED = 7

# The form of residuals: their first byte. Up to 8, it is the number of zigzag planes.
FLOAT32_GRID = 16
SPARSE_STEPS = 17
ANS_STEPS = 18
MASKED_STEPS = 19

# The source of the units of a grid.
CONSTANT_UNIT = 0
ROOT_BEFORE = 1
ROOT_AFTER = 2
"""The square root of `exp_avg_sq` before or after the step."""
UNIT_SOURCES = 3
GROWTH_CONTEXTS = 8
"""Number of contexts of grid symbols: how much `exp_avg_sq` has grown."""
MAX_BUCKETS = 16
