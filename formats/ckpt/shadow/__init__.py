"""A restore that never ends: the states of a recorded run in memory, always those of its last complete step.

docs/shadows.md describes it for users.
"""
