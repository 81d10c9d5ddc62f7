"""Published steps: the weights after each step of a run, for those that follow it. See docs/format.md.

`records` says which steps there are, `model` what a state consists of, `share` is what one rank stores of a step,
`steps` reads them by name, `route` finds the way from one step to another, `state` opens a step as a checkpoint.
"""
