"""Lossless codecs, each for one state by itself."""
