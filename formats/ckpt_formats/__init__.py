"""Checkpoint formats, and the lazy tensors they share. `registry` knows them by name."""
