"""Runs with failures, simulated: what checkpointing systems of the literature, and ours, make of the same training.

`settings` has the figures and where they are from, `systems` turns them into the course of a run, `failures` lets runs
fail, `page` draws the results. `benchmarks/simulate_training.py` prints them.
"""
