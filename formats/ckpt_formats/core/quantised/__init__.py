"""Quantised weights of a checkpoint: which tensors they consist of, and their values as one lazy tensor."""
