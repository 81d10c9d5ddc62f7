"""The compiled kernels as functions of arrays, one module per family. `library` loads them at the first call."""
