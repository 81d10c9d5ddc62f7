"""Parity beside the files of a checkpoint: write it, find damage by it, and repair what is lost."""
