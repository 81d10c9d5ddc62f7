"""What a rank of each training engine has in memory: which parameters, which parts of them, in which tensors."""
