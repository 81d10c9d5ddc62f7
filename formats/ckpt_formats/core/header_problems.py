"""What headers say is wrong with a checkpoint, without reading a tensor."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.seals import SealTable
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import FileProblem, cut_short
from ckpt_formats.core.text import counted


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
    """Yield a problem for each tensor that is not covered exactly once, each file that is cut short, and each name that
    nothing has."""
    tensors = () if isinstance(checkpoint.parameters, TabulatedParameters) else checkpoint.tensors()
    of_files: dict[FileProblem, dict[str, None]] = {}
    for parameter, state, tensor in tensors:
        for problem in tensor.problems():
            if isinstance(problem, FileProblem):
                of_files.setdefault(problem, {})[parameter.name] = None
            else:
                yield HeaderProblem("coverage", f"{state}: {problem}", str(checkpoint.path), (parameter.name,))
    yield from _of_files(of_files)
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
    yield from _of_files({cut_short(path, sizes[path], ends[path]): own for path, own in names.items()})


def _of_files(problems: Mapping[FileProblem, Collection[str]]) -> Iterator[HeaderProblem]:
    """Yield one problem for each file, whatever the number of tensors that it affects."""
    for problem, names in problems.items():
        yield HeaderProblem(
            "header", f"{problem}; {counted(len(names), 'parameter')} affected", str(problem.path), tuple(names)
        )
