"""Publish the weights of a run step by step, for those that follow it. See docs/weight-sync.md.

`rank_buffers` codes what one rank has, `publication` commits a step that all ranks have stored, `retention` removes
what is no longer needed. `source` states what is published of a checkpoint, and `publish` does all of it for one.
"""
