"""Checkpoints of distributed training: open, look, edit, save."""
