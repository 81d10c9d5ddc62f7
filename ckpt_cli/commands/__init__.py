"""One module per sub-command. They import the library when they run, so that `ckpt --help` costs nothing."""
