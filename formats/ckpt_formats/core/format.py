"""The interface of formats: how checkpoints are read, and how they are written in three steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ckpt_formats.core.arguments import Checked, Count
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.files import Reader
from ckpt_formats.core.identity import Identity, check_unchanged, recording
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Blob, ComputedFragments, FileBlob, Tensor
from ckpt_formats.core.zero_runs import ZeroRun

if TYPE_CHECKING:
    from ckpt_formats.core.evidence import Evidence
    from ckpt_formats.core.transfer import Transfer
    from ckpt_formats.core.value_changes import ValueChange

Counts = np.ndarray[Any, np.dtype[np.int64]]

Naming = Literal["hf", "megatron", "megatron-legacy", "gguf", "torchtitan", "meta", "maxtext"]
"""Whose names the tensors have: those of Hugging Face's libraries, of Megatron core, of older Megatron-LM, or of
llama.cpp."""


@dataclass(frozen=True)
class ReadOptions:
    """What a reader may need and the files do not state."""

    rules: tuple[Rule, ...] = ()
    order: tuple[str, ...] = ()
    """The names of the parameters that an optimizer numbers, from number 0 on."""
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for each of several optimizers, by its path in the file, such as `optimizer_states.0`."""
    shapes: Checkpoint | None = None
    """Another checkpoint of the same model, if the one to be read has flat slices without their shapes."""
    missing_files: bool = False
    """Open also without files of tensors that are missing, where metadata say what was in them (DCP). Their blocks are
    then `problems` of the tensors: such a checkpoint is not written, but recovered partially."""


@dataclass(frozen=True)
class FilePlan(Checked):
    """One file that will be written, with all that is needed to write it, in any process.

    A file may be planned by its coordinates only. Then `content` is a small dataclass of numbers, `parameters` and
    `tensors` are empty, and `layouts` computes them from the coordinates: whoever writes the file calls `laid_out`.
    """

    file: str
    """Its path within the new checkpoint's folder."""
    parameters: tuple[Parameter, ...] = ()
    content: object = None
    """The rest of the file's content: a small frozen dataclass of the format, one class for each kind of file."""
    size: Count | None = None
    """Bytes of the file, if they are known and are not the sum of the parameters."""
    role: str = "all"
    rank: Mapping[str, int] = field(default_factory=dict)
    """The rank whose file it will be, as in `SourceFile`."""
    tensors: tuple[Tensor, ...] = ()
    """The tensors in the file, if they are not the parameters as they are."""
    layouts: FileLayouts | None = field(default=None, repr=False, compare=False)
    """What all files of the plan share, if this one is planned by its coordinates. To send a file to a process that has
    it already, leave it out: `replace(file, layouts=None)`."""

    @property
    def nbytes(self) -> int:
        """About how many bytes are read and written for it."""
        return sum(parameter.nbytes for parameter in self.parameters) if self.size is None else self.size

    def laid_out(self) -> FilePlan:
        """The file with its parameters, tensors and content. Raises `CkptError` as `WritableFormat.plan` does."""
        return self if self.layouts is None else self.layouts.lay_out(self)

    def names(self) -> Sequence[str]:
        """The names of the parameters of which it has a part. Nothing is laid out."""
        return [p.name for p in self.parameters] if self.layouts is None else self.layouts.names(self)

    def ranges(self) -> Sequence[TensorRanges]:
        """The values in the file: those of `tensors`, or all states of the parameters."""
        if self.layouts is not None:
            return self.layouts.ranges(self)
        return [TensorRanges.whole(self.tensors or [t for p in self.parameters for t in p.states.values()])]


@dataclass(frozen=True)
class TensorRanges:
    """The values that a file has, as one range of elements of each of many tensors."""

    tensors: Sequence[Tensor]
    """The same object for all files that have ranges of the same tensors."""
    starts: Counts
    """The first element of each range, counted in C order: (tensors,) int64."""
    stops: Counts
    """The element after the last one: (tensors,) int64."""
    is_whole: bool = False
    """Whether the tensors are stored as they are. Else each range is read from a tensor and all its replicas."""

    @classmethod
    def whole(cls, tensors: Sequence[Tensor]) -> TensorRanges:
        """All elements of these tensors."""
        sizes = np.array([tensor.size for tensor in tensors], np.int64)
        return cls(tensors, np.zeros_like(sizes), sizes, True)


class FileLayouts(ABC):
    """What all files of a plan share, so that a file can be planned by its coordinates and laid out when it is written.

    A frozen dataclass of the format. What it computes from its fields is not pickled.
    """

    @abstractmethod
    def lay_out(self, file: FilePlan) -> FilePlan:
        """The file with its parameters, tensors and content, and without `layouts`."""

    @abstractmethod
    def names(self, file: FilePlan) -> Sequence[str]:
        """The names of the parameters of which the file has a part. Files with equal names share one object."""

    @abstractmethod
    def ranges(self, file: FilePlan) -> Sequence[TensorRanges]:
        """The values in the file, computed without laying it out if other files have ranges of the same tensors."""

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: self.__dict__[one.name] for one in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan(Checked):
    """The files that will be written, and what the user should know before."""

    files: tuple[FilePlan, ...]
    dropped: tuple[Notice, ...] = ()
    """The items of the source that the format cannot hold."""
    notes: tuple[Notice, ...] = ()
    """What the user should know of the result before it is written."""
    single_file: str | None = None
    """The name, within the folder, of the one file that is the checkpoint; None if the folder is."""

    @property
    def nbytes(self) -> int:
        """About how many bytes are read and written for all files."""
        return sum(file.nbytes for file in self.files)


def _no_evidence() -> Evidence:
    from ckpt_formats.core.evidence import Evidence  # only writing needs it

    return Evidence()


@dataclass(frozen=True)
class Receipt:
    """The result of writing one file: plain data, small, and enough to verify the file."""

    file: str
    nbytes: int
    seals: tuple[Seal, ...]
    entry: Mapping[str, Any]
    evidence: Evidence = field(default_factory=_no_evidence)
    """Of what was read of the source's seals."""
    e_tag: str = ""
    """What a store calls this version of the object; empty if the file is in a file system."""
    changes: tuple[ValueChange, ...] = ()
    """What was changed in the file's values other than by rounding."""
    zeros: tuple[ZeroRun, ...] = ()
    """Where the files that were read for it have nothing but zeros."""
    placed: int = 0
    """Bytes that were written at their place in the plan's single file at once, besides the file of this receipt."""
    chunks: int = 0
    """Chunks of the source's encoded values that matched their checksums as they were decoded for it."""

    @property
    def written(self) -> int:
        """All bytes that were written."""
        return self.nbytes + self.placed


class Format(ABC):
    """A format that can be read."""

    name: ClassVar[str]
    summary: ClassVar[str]
    even_states: ClassVar[bool] = False
    """Whether the engine has every state for every parameter of an optimizer's group."""
    is_own: ClassVar[bool] = False
    """Whether it is a format of ckpt: its files state the original format, and have checksums of all their bytes."""
    is_of_engine: ClassVar[bool] = False
    """Whether an engine saves it, so that trainers of Hugging Face's save files of their own next to it."""
    joins_ranks: ClassVar[bool] = True
    """Whether it reads the files of several ranks as one checkpoint."""
    files_are_checkpoints: ClassVar[bool] = False
    """Whether each file in a folder may be a checkpoint of its own, as Lightning saves them."""

    @abstractmethod
    def detect(self, path: Path) -> bool:
        """Whether this path, a file or a folder, is a checkpoint of this format. Cheap, and never raises."""

    @abstractmethod
    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """The index of the checkpoint. Raises subclasses of `CkptError`."""


@dataclass(frozen=True, kw_only=True)
class WritableFormat(Checked, Format):
    """A format that can also be written, in three steps: plan, write each file, commit.

    A format is a frozen dataclass, and its fields are its options. None means: as in the source. Values that an option
    cannot have raise `InvalidArgumentError` when the format is constructed (`core.arguments`).

    `plan` has no side effects. `write` changes only its own file; calls may come in any
    order, and again. `commit` runs once, last, and writes the file by which `detect`
    recognises the folder.
    """

    needs_model: ClassVar[bool] = True
    """Whether the format can only hold checkpoints that have the weights of a model."""
    naming: ClassVar[Naming | None] = None
    """The names that tensors must have in this format; None: any names."""

    @abstractmethod
    def plan(self, source: Checkpoint) -> Plan:
        """The files to write. Raises `UnsupportedError` for tensors that the format cannot hold."""

    @abstractmethod
    def write(self, folder: Path, file: FilePlan, transfer: Transfer) -> Receipt:
        """Write one file of the new checkpoint into `folder`. Raises `CkptError` if its values cannot be read."""

    def is_intact(self, folder: Path, receipt: Receipt, reader: Reader) -> bool:
        """Whether the file of a receipt, written into `folder` by an earlier run, still has the bytes of then."""
        from ckpt_formats.core.seal_checks import seal_is_valid  # only a job that goes on needs it

        path = folder / receipt.file
        return all(seal_is_valid(replace(seal, path=path), reader) for seal in receipt.seals)

    @abstractmethod
    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """Write what makes the folder a checkpoint. `receipts` are in the order of the plan."""

    def for_target(self, target: Path) -> WritableFormat:
        """The format with the options that follow from the target's name, such as one file instead of a folder."""
        return self

    def inputs(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that are read besides the source."""
        return ()

    def input_files(self) -> tuple[Path, ...]:
        """Files and folders that the options name and that are read."""
        return ()

    def identity(self) -> object:
        """Plain data that differs from that of other objects of the class if they write other bytes: all options."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def identified(read: Callable[[], Checkpoint]) -> Checkpoint:
    """The result of `read`, with the identities of all files in which the checkpoint is.

    Raises `CorruptError` if one of them was changed meanwhile.
    """
    with recording() as identities:
        checkpoint = read()
    for file in dict.fromkeys(_files(checkpoint)):
        if file not in identities:
            with suppress(OSError):  # a missing file is reported when it is read
                identities[file] = Identity.of(file.stat())
    check_unchanged(identities)
    return replace(checkpoint, identities=identities)


def _files(checkpoint: Checkpoint) -> Iterator[Path]:
    """The checkpoint's files. Seals that are computed on demand would read them; then `checkpoint.files` are all."""
    yield from (file.path for file in checkpoint.files)
    if isinstance(checkpoint.seals, (tuple, list)):
        yield from (seal.path for seal in checkpoint.seals)
        known = dict[int, object]()
        for *_, tensor in checkpoint.tensors():
            yield from _paths(tensor, known)


def _paths(blob: Blob, known: dict[int, object]) -> Iterator[Path]:
    """The files that a blob is in; those of computed slices once for each source, of which `known` are done."""
    if isinstance(blob, DerivedBlob):
        yield from _paths(blob.base, known)
    elif not isinstance(blob, Tensor):
        yield from (raw.path for raw in blob.sources())
    else:
        for copy in (blob, *blob.replicas):
            if not isinstance(copy.fragments, ComputedFragments):
                last: Path | None = None
                for fragment in copy.fragments:
                    inner = fragment.blob
                    if type(inner) is not FileBlob:
                        yield from _paths(inner, known)
                    elif inner.path is not last:
                        yield (last := inner.path)
            elif id(copy.fragments.source) not in known:
                known[id(copy.fragments.source)] = copy.fragments.source
                yield from copy.fragments.paths()
