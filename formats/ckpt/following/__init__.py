"""Follow a published chain: hold the weights of its last step, and bring others forward by what changed.

`source` reads a chain, `state` is a state in memory, `decode` brings one forward and verifies it, `follower` holds one
in a process, `served` in a folder of safetensors.
"""
