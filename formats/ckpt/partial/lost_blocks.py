"""Which blocks of a checkpoint are lost: by the names of parameters, by ranks, or because no file has them.

A block is a box of a parameter. A copy of it that another rank saved is as good, so it is lost only if all copies are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ckpt_formats.core.arguments import Admits, Checked, Count
from ckpt_formats.core.checkpoint import Checkpoint, Parameter, SourceFile
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.geometry import Box, missing
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import Fragment, Tensor
from ckpt_formats.core.text import printable

STEP_COUNT = "step"
"""What torch calls the state that counts the optimizer's steps. The count of the run goes on."""

LostBlocks = Mapping[tuple[str, str], tuple[Box, ...]]
"""Disjoint blocks by parameter and state."""


@dataclass(frozen=True)
class RankSet(Checked):
    """Ranks whose files are lost: numbers along one dimension, such as `dp` or `tp`.

    `dimension` None: the only one in which files of the checkpoint differ, such as `rank` in DCP.
    """

    numbers: Annotated[tuple[Count, ...], Admits("numbers of ranks", len)]
    dimension: str | None = None


def lost_by_name(live: Checkpoint, patterns: Sequence[str]) -> LostBlocks:
    """All of the parameters whose names match a regular expression, searched anywhere in the name.

    Step counts are not lost. Raises `NoMatchError` for a pattern that matches nothing.
    """
    blocks: dict[tuple[str, str], tuple[Box, ...]] = {}
    for pattern in patterns:
        safe_pattern(pattern, "--lost")
        matching = [live.parameters[name] for name in live if search(pattern, name)]
        if not matching:
            raise NoMatchError(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
        for parameter in matching:
            states = (state for state in parameter.states if state != STEP_COUNT)
            blocks |= {(parameter.name, state): (Box.whole(parameter.states[state].shape),) for state in states}
    return blocks


def lost_by_rank(live: Checkpoint, ranks: Sequence[RankSet]) -> LostBlocks:
    """What only files of these ranks have, or no file.

    Of a parameter, a block is lost in all states of the weight's shape, so that master, copy and moments are of one
    step. Raises `NoMatchError` for a rank that wrote no file, `InvalidArgumentError` if the dimension is not clear.
    """
    files = lost_files(live, ranks)
    blocks: dict[tuple[str, str], tuple[Box, ...]] = {}
    for parameter in live.parameters.values():
        gaps = {state: _gaps(tensor, files) for state, tensor in parameter.states.items()}
        if not any(gaps.values()):
            continue
        shared = _union(gap for state, boxes in gaps.items() if _is_elementwise(parameter, state) for gap in boxes)
        for state, boxes in gaps.items():
            lost_here = shared if _is_elementwise(parameter, state) else boxes
            if lost_here:
                blocks[parameter.name, state] = tuple(lost_here)
    return blocks


def lost_files(live: Checkpoint, ranks: Sequence[RankSet]) -> frozenset[Path]:
    """The files of ranks.

    Raises `NoMatchError` for a rank that wrote none, `InvalidArgumentError` if the dimension is not clear.
    """
    files: set[Path] = set()
    for one in ranks:
        dimension = one.dimension or _only_dimension(live.files)
        for number in one.numbers:
            matching = {file.path for file in live.files if file.rank.get(dimension) == number}
            if not matching:
                raise NoMatchError(
                    f"no file belongs to rank {number} ({printable(dimension)})",
                    where=live.path,
                    hint="`ckpt inspect -v` lists files and their ranks.",
                )
            files |= matching
    return frozenset(files)


def surviving(tensor: Tensor, blocks: Sequence[Box], files: Collection[Path]) -> Iterator[Fragment]:
    """Disjoint fragments that cover a tensor without some blocks, none of them from these files."""
    gaps = missing(Box.whole(tensor.shape), blocks)
    for piece in _pieces(tensor):
        if gaps and not _is_lost(piece, files):
            covered = [part for gap in gaps if (part := piece.crop(gap)) is not None]
            yield from covered
            gaps = [rest for gap in gaps for rest in missing(gap, [part.box for part in covered])]


def _only_dimension(files: Sequence[SourceFile]) -> str:
    numbers: dict[str, set[int]] = {}
    for file in files:
        for dimension, number in file.rank.items():
            numbers.setdefault(dimension, set()).add(number)
    several = sorted(dimension for dimension, of_files in numbers.items() if len(of_files) > 1)
    if len(several) == 1:
        return several[0]
    if not several and len(numbers) == 1:
        return next(iter(numbers))
    if not several:
        raise UnsupportedError("the files are not of single ranks")
    raise InvalidArgumentError(
        "the files differ in several dimensions of ranks",
        hint=f"Name the dimension, such as {several[0]}=1: there are {', '.join(several)}.",
    )


def _is_elementwise(parameter: Parameter, state: str) -> bool:
    return parameter.states[state].shape == parameter.weight.shape and state != STEP_COUNT


def _gaps(tensor: Tensor, files: Collection[Path]) -> list[Box]:
    """The blocks of a tensor that only these files have, or none."""
    gaps = [Box.whole(tensor.shape)] if tensor.size else []
    for piece in _pieces(tensor):
        if not gaps:
            break
        if not _is_lost(piece, files):
            gaps = [rest for gap in gaps for rest in gap.minus(piece.box)]
    return gaps


def _pieces(tensor: Tensor) -> Iterator[Fragment]:
    """The fragments of a tensor, then those of its replicas; those of tensors within it one by one."""
    for fragment in tensor.fragments:
        if isinstance(fragment.blob, Tensor):
            for piece in _pieces(fragment.blob):
                yield Fragment(piece.box.shift(fragment.box.start), piece.blob)
        else:
            yield fragment
    for replica in tensor.replicas:
        yield from _pieces(replica)


def _is_lost(piece: Fragment, files: Collection[Path]) -> bool:
    if any(True for _ in piece.blob.problems()):
        return True
    return bool(files) and any(source.path in files for source in piece.blob.sources())


def _union(boxes: Iterator[Box]) -> list[Box]:
    """Disjoint boxes with the same elements as boxes that may overlap."""
    union: list[Box] = []
    for box in boxes:
        union += missing(box, union)
    return union
