"""Megatron's legacy checkpoints: one torch file for each model-parallel rank."""
