"""Quantised weights: codes, scales, zero points and tables as values, and back. Arrays only: no names, no files."""
