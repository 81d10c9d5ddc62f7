"""Containers of tensors and of data, which several formats share: torch archives, safetensors, JSON."""
