"""The log of gradients: the inputs of a run's optimizer at each step, from which any step can be restored.

A segment is a folder in a chain with `layout.json` and one file of records for each rank. See docs/format.md.
"""
