"""Copy checkpoints and chains as they are, between folders and stores: equal files with equal names."""
