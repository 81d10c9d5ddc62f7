"""How one chunk of elements is stored: its frame, and the streams of bytes inside it."""
