"""Lossless delta codecs. `docs/delta-codecs.md` specifies the bytes."""
