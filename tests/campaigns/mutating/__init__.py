"""Faults seeded into the product, to measure what the tests find: see `mutations.py`."""
