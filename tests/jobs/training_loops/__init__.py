"""Training loops as people write them, each a function that records itself: see tests/recording_loops.py."""
