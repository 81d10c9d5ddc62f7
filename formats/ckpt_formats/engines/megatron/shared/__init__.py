"""What both of Megatron's containers have in common: one model, its ranks, its optimizer."""
