"""Read blocks of a checkpoint into memory of the caller, and verify the checksums from what several processes read."""

from ckpt.reading.reading import Reading
from ckpt.reading.verification import Verification

__all__ = ["Reading", "Verification"]
