"""The log of gradients: what a run's optimizer was given at each step, so that any step can be restored.

A segment is a folder in a chain: `layout.json`, and a file of records for each rank. See docs/format.md.
"""
