"""What every format is built of: boxes, tensors, checkpoints, rules, files."""
