"""What is at a path: the engine of a checkpoint, the one of several that is meant, and files that are not read."""
