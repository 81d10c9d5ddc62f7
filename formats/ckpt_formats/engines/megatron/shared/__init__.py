"""Code that both of Megatron's layouts share: the model, its ranks and its optimizer."""
