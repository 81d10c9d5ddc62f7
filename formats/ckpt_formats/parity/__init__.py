"""Parity of files: which blocks belong together, what their hashes are, and how lost ones are computed from others."""
