"""What headers say is wrong with a checkpoint, without reading a tensor."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.seals import SealTable
from ckpt_formats.core.state_table import TabulatedParameters


class HeaderProblem(NamedTuple):
    """A problem: its description, its file or checkpoint, and the parameters that it affects."""

    kind: Literal["coverage", "suspicious", "header"]
    what: str
    where: str
    tensors: tuple[str, ...] = ()


def header_problems(checkpoint: Checkpoint) -> Iterator[HeaderProblem]:
    """Yield missing blocks, suspicions, contradictions between headers, and files that end too early."""
    yield from missing_blocks(checkpoint)
    for suspicion in checkpoint.suspicions:
        yield HeaderProblem("suspicious", suspicion, str(checkpoint.path))
    yield from contradictions(checkpoint)
    yield from _cut_short(checkpoint)


def missing_blocks(checkpoint: Checkpoint) -> Iterator[HeaderProblem]:
    """Yield a problem for each tensor that is not covered exactly once, and for each name that nothing has."""
    tensors = () if isinstance(checkpoint.parameters, TabulatedParameters) else checkpoint.tensors()
    for parameter, state, tensor in tensors:
        for problem in tensor.problems():
            yield HeaderProblem("coverage", f"{state}: {problem}", str(checkpoint.path), (parameter.name,))
    for name, message in checkpoint.dangling_names():
        yield HeaderProblem("coverage", message, str(checkpoint.path), (name,))


def contradictions(checkpoint: Checkpoint) -> Iterator[HeaderProblem]:
    """Yield a problem for each file whose header says otherwise than the checkpoint's index."""
    if isinstance(checkpoint.seals, SealTable):
        for one in checkpoint.seals.contradictions():
            yield HeaderProblem("header", one.what, str(one.path), () if one.tensor is None else (one.tensor,))


def _cut_short(checkpoint: Checkpoint) -> Iterator[HeaderProblem]:
    """Yield a problem for each file that is shorter than its tensors."""
    if isinstance(checkpoint.parameters, TabulatedParameters):
        return  # opening it compared the files with the index
    ends: dict[Path, int] = {}
    names: dict[Path, dict[str, None]] = {}
    sizes = {file.path: file.nbytes for file in checkpoint.files}
    for parameter, _, tensor in checkpoint.tensors():
        for raw in tensor.sources():
            ends[raw.path] = max(ends.get(raw.path, 0), raw.offset + raw.span)
            if raw.offset + raw.span > sizes.get(raw.path, raw.offset + raw.span):
                names.setdefault(raw.path, {})[parameter.name] = None
    for path, own in names.items():
        what = f"ends at byte {sizes[path]}, but its tensors end at byte {ends[path]}"
        yield HeaderProblem("header", what, str(path), tuple(own))
