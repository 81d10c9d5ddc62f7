"""How far the blocks of a state moved since they were saved last, and which of them to save first.

SCAR (Qiao et al., arXiv 1810.07354) saves a fraction of the parameters more often, those with the largest distance to
their saved values: then a later loss of blocks perturbs training least.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ckpt.partial.lost_blocks import STEP_COUNT, LostBlocks
from ckpt.partial.recovery import take_blocks
from ckpt_formats.core.arguments import MAY_BE_INFINITE, Checked, Count, Share, checked
from ckpt_formats.core.checkpoint import MASTER, Checkpoint, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, flat_boxes
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.text import printable

Norm = Literal[1, 2]
BLOCK = 1 << 16
"""Elements of a block: few enough that a share of a small model is some of its blocks."""


@dataclass(frozen=True)
class BlockChange(Checked):
    """How far a block of a parameter moved between two states."""

    name: str
    boxes: tuple[Box, ...]
    """Whole rows, so mostly one box."""
    distance: Annotated[float, MAY_BE_INFINITE]
    """The norm of the change of its weights; NaN counts as infinity."""
    nbytes: Count
    """Bytes of all its states of the weight's shape."""


@checked
def block_changes(saved: Checkpoint, current: Checkpoint, norm: Norm = 2) -> list[BlockChange]:
    """The distance of each block of the weights to its saved values, the largest first.

    Blocks are whole rows of about 2^16 elements. The distance is the L1 or L2 norm of the difference of the masters,
    else of the weights, in float64. Both states are read, one block at a time.

    Raises `IncompleteError` if a parameter has no saved values, `UnsupportedError` for another shape,
    `InvalidArgumentError` for another norm.
    """
    changes: list[BlockChange] = []
    with Reader(check=False) as reader:
        for parameter in _trained(current):
            changes += _of_parameter(parameter, _saved_weight(saved, parameter), norm, reader)
    return sorted(changes, key=lambda change: -change.distance)


@checked
def within_budget(changes: Iterable[BlockChange], share: Share) -> list[BlockChange]:
    """The first of these blocks that together have at most a share of all bytes, but at least one block.

    Raises `InvalidArgumentError` unless the share is above 0 and at most 1.
    """
    changes = list(changes)
    left, chosen = share * sum(change.nbytes for change in changes), list[BlockChange]()
    for change in changes:
        if chosen and change.nbytes > left:
            break
        chosen.append(change)
        left -= change.nbytes
    return chosen


@checked
def apply_changes(saved: Checkpoint, current: Checkpoint, share: Share, norm: Norm = 2) -> Checkpoint:
    """Apply to a saved state the blocks that moved most, up to a share of all bytes. The other blocks stay as saved.

    Parameters that are not trained, step counts, groups and extras are the current ones. Appended to the chain of the
    saved state, it takes about that share of the bytes of a full delta. Raises like `block_changes`.
    """
    changes = block_changes(saved, current, norm)
    chosen = {(change.name, change.boxes) for change in within_budget(changes, share)}
    older: dict[str, list[Box]] = {}
    for change in changes:
        if (change.name, change.boxes) not in chosen and change.distance:
            older.setdefault(change.name, []).extend(change.boxes)
    return take_blocks(current, saved, _in_all_states(current, older)) if older else current


def _trained(current: Checkpoint) -> Iterator[Parameter]:
    for name in current:
        parameter = current.parameters[name]
        if parameter.role == "parameter" and is_float(_weight(parameter).dtype):
            yield parameter


def _weight(parameter: Parameter) -> Tensor:
    return parameter.states.get(MASTER, parameter.weight)


def _saved_weight(saved: Checkpoint, parameter: Parameter) -> Tensor:
    other = saved.parameters.get(parameter.name)
    if other is None:
        raise IncompleteError(f"`{printable(parameter.name)}` has no saved values", where=saved.path)
    if _weight(other).shape != _weight(parameter).shape:
        shapes = f"{list(_weight(other).shape)}, not {list(_weight(parameter).shape)}"
        raise UnsupportedError(f"`{printable(parameter.name)}` was saved with the shape {shapes}", where=saved.path)
    return _weight(other)


def _of_parameter(parameter: Parameter, before: Tensor, norm: Norm, reader: Reader) -> Iterator[BlockChange]:
    after = _weight(parameter)
    chunking = _blocks(after.shape)
    itemsize = sum(tensor.dtype.itemsize for tensor in parameter.states.values() if tensor.shape == after.shape)
    for index in range(chunking.count):
        start, stop = chunking.range(index)
        boxes = tuple(flat_boxes(after.shape, start, stop))
        sums = [_distance(before.crop(box), after.crop(box), norm, reader) for box in boxes]
        total = sum(sums) if norm == 1 else float(np.sqrt(sum(one * one for one in sums)))
        yield BlockChange(parameter.name, boxes, total if total == total else float("inf"), (stop - start) * itemsize)


def _blocks(shape: Shape) -> Chunking:
    """A parameter in blocks of whole rows, as its chunks are, but smaller."""
    *rows, width = Chunking.default(shape).chunk
    return Chunking(shape, (max(1, BLOCK // width), width) if rows else (min(BLOCK, width),))


def _distance(before: Tensor, after: Tensor, norm: Norm, reader: Reader) -> float:
    with np.errstate(all="ignore"):
        change = read(after, reader).astype(np.float64) - read(before, reader).astype(np.float64)
        return float(np.linalg.norm(change.reshape(-1), norm))


def _in_all_states(current: Checkpoint, older: dict[str, list[Box]]) -> LostBlocks:
    blocks: dict[tuple[str, str], tuple[Box, ...]] = {}
    for name, boxes in older.items():
        states: Sequence[str] = [
            state
            for state, tensor in current.parameters[name].states.items()
            if tensor.shape == current.parameters[name].weight.shape and state != STEP_COUNT
        ]
        blocks |= {(name, state): tuple(boxes) for state in states}
    return blocks
