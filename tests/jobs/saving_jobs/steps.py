"""When runs are saved. Nothing here imports torch."""

STEPS = (2, 3, 5)
AFTER = 2
"""Steps after the last save."""
