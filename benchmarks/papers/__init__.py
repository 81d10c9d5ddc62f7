"""Codecs of papers, written from their descriptions, to be measured beside ours: `python benchmarks/papers.py`.

Each module names its paper, says which parts of the description were known, and has functions on one tensor at two
steps. They are not in the wheel: docs/papers.md says why, with figures.
"""
