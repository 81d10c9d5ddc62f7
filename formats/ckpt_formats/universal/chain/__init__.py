"""A chain: a folder of checkpoints of one run, each whole or a delta on the one before. See docs/format.md."""
