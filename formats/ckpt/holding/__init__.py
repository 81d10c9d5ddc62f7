"""The state of a run in the memory of other hosts: where it lies, who holds it, and who sends it."""
