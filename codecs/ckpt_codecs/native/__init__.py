"""The compiled kernels, one module for each family. `library` loads them when the first one is called."""
