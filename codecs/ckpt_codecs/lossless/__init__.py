"""Lossless codecs of a single state."""
