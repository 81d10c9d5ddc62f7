"""Check that optimizer states belong to the weights: a few values of each master must round to the weights.

Megatron rounds masters to weights in every step, so the check finds two errors. The flat buffers of the distributed
optimizer have no names, so parameters may be assigned in a wrong order. And every release of Megatron core up to 0.19
can save `fully_reshardable` states shifted against the weights: it reads them from an unpadded buffer, at offsets that
include padding.
"""

from collections.abc import Iterator
from dataclasses import replace

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.rounded import is_rounded
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names

_VALUES = 64
_BLOCKS = 8
_PARAMETERS = 4096


def suspicions_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """A suspicion if masters do not round to the weights, else an empty tuple. Reads a few values of each parameter."""
    compared, differing = 0, []
    with Reader(check=False) as reader:
        for parameter in _sample(checkpoint):
            if (agrees := _agrees(parameter, reader)) is not None:
                compared += 1
                if not agrees:
                    differing.append(parameter.name)
    if not differing:
        return ()
    return (
        f"the optimizer's masters of {len(differing)} of {compared} parameters do not round to the weights, "
        f"among them {list_names(differing)}: the optimizer states are shifted, or from another iteration. "
        "Megatron core up to 0.19 can save shifted states: as fully_reshardable with several buckets",
    )


def _sample(checkpoint: Checkpoint) -> list[Parameter]:
    """Parameters with masters, at most 4096, evenly spaced: a shift affects all parameters that follow."""
    with_master = [parameter for parameter in checkpoint.parameters.values() if MASTER in parameter.states]
    return with_master[:: -(-len(with_master) // _PARAMETERS) or 1]


def _agrees(parameter: Parameter, reader: Reader) -> bool | None:
    """True if the compared values of master and weight agree; None if there is nothing to compare."""
    master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
    if master is None or copy is None or not master.size:
        return None
    if master.shape != copy.shape:
        return False
    master, copy = replace(master, replicas=()), replace(copy, replicas=())
    return all(is_rounded(copy.crop(box), master.crop(box), reader) for box in _ends(master))


def _ends(tensor: Tensor) -> Iterator[Box]:
    """Boxes of at most 64 values at the beginning and at the end of each of the first 8 stored blocks."""
    for fragment in tensor.fragments[:_BLOCKS]:
        first = next(slabs(fragment.box.shape, _VALUES))
        yield first.shift(fragment.box.start)
        last = tuple(n - length for n, length in zip(fragment.box.shape, first.shape, strict=True))
        if any(last):
            yield Box(last, fragment.box.shape).shift(fragment.box.start)
