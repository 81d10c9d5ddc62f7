"""What the C kernels compute, in NumPy and plain Python: one module for each C file, to compare with, slowly."""
