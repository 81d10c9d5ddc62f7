"""The stored form of a chunk of elements: its frame, and the streams of bytes in it."""
