"""What a format is: how its checkpoints are read, and how they are written in three steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.files import Evidence, Seal
from ckpt_formats.core.identity import Identity, check_unchanged, recording
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Tensor

if TYPE_CHECKING:
    from ckpt_formats.core.transfer import Transfer

Naming = Literal["hf", "megatron", "megatron-legacy"]
"""Whose names tensors have: those of Hugging Face's libraries, of Megatron core, or of Megatron before it."""


@dataclass(frozen=True)
class ReadOptions:
    """What a reader may need to know that is not in the files."""

    rules: tuple[Rule, ...] = ()
    order: tuple[str, ...] = ()
    """The names of the parameters that an optimizer numbers, from number 0 on."""
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for each of several optimizers, by their places in the file, such as `optimizer_states.0`."""
    shapes: Checkpoint | None = None
    """Another checkpoint of the same model, where the one to be read holds flat slices without their shapes."""


@dataclass(frozen=True)
class FilePlan:
    """One file that will be written: all it takes to write it, in any process."""

    file: str
    """Its path within the new checkpoint's folder."""
    parameters: tuple[Parameter, ...]
    content: object = None
    """What the file will hold besides: a small frozen dataclass of the format, for each kind of file another."""
    size: int | None = None
    """Bytes of the file, where they are known and are not the sum of the parameters."""
    role: str = "all"
    rank: Mapping[str, int] = field(default_factory=dict)
    """Whose file it will be, as in `SourceFile`."""
    tensors: tuple[Tensor, ...] = ()
    """What the file will hold, where that is not the parameters as they are."""

    @property
    def nbytes(self) -> int:
        """About how many bytes are moved to write it."""
        return sum(parameter.nbytes for parameter in self.parameters) if self.size is None else self.size


@dataclass(frozen=True)
class Plan:
    """What will be written."""

    files: tuple[FilePlan, ...]
    dropped: tuple[Notice, ...] = ()
    """What of the source the format has no place for."""
    notes: tuple[Notice, ...] = ()
    """What the user should know of the result before it is written."""
    single_file: str | None = None
    """The name, within the folder, of the one file that is the checkpoint; None if the folder is."""

    @property
    def nbytes(self) -> int:
        """About how many bytes are moved to write all files."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class Receipt:
    """What became of a file: plain data, small, and enough to check the file again."""

    file: str
    nbytes: int
    seals: tuple[Seal, ...]
    entry: Mapping[str, Any]
    evidence: tuple[Evidence, ...] = ()


class Format(ABC):
    """A format that can be read."""

    name: ClassVar[str]
    summary: ClassVar[str]
    even_states: ClassVar[bool] = False
    """Does the engine keep every state for every parameter of an optimizer's group?"""

    @abstractmethod
    def detect(self, path: Path) -> bool:
        """Is this path, a file or a folder, a checkpoint of this format? Cheap, and never raises."""

    @abstractmethod
    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """The index of the checkpoint. Raises `CkptError` of the kind that fits."""


@dataclass(frozen=True, kw_only=True)
class WritableFormat(Format):
    """A format that can also be written, in three steps: plan, write each file, commit.

    A format is a frozen dataclass, and its fields are its options. None means: as the source has it.

    Laws: `plan` is pure. `write` touches only its own file, may be run again, and in
    any order. `commit` runs once, last, and writes what makes the folder
    recognisable; until then `detect` refuses it.
    """

    needs_model: ClassVar[bool] = True
    """Is a checkpoint without weights of a model nothing that the format can hold?"""
    naming: ClassVar[Naming | None] = None
    """Whose names tensors must have in this format; None: any names."""

    @abstractmethod
    def plan(self, source: Checkpoint) -> Plan:
        """The files to write. Raises `Unsupported` for tensors that the format cannot hold."""

    @abstractmethod
    def write(self, folder: Path, file: FilePlan, transfer: Transfer) -> Receipt:
        """Write one file of the new checkpoint into `folder`."""

    @abstractmethod
    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """Make the folder a checkpoint. `receipts` are in the order of the plan."""

    def for_target(self, target: Path) -> WritableFormat:
        """The format with the options that follow from the target's name, such as one file instead of a folder."""
        return self

    def inputs(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that are read besides the source."""
        return ()

    def input_files(self) -> tuple[Path, ...]:
        """Files and folders that the options name, and that are read."""
        return ()

    def identity(self) -> object:
        """Plain data that tells this object from others of its class which write other bytes: all its options."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def identified(read: Callable[[], Checkpoint]) -> Checkpoint:
    """What `read` returns, with the identities of all files that it is in.

    Raises `Corrupt` if one of them was changed meanwhile.
    """
    with recording() as identities:
        checkpoint = read()
    for file in dict.fromkeys(_files(checkpoint)):
        if file not in identities:
            with suppress(OSError):  # whoever reads it reports that it is missing
                identities[file] = Identity.of(file.stat())
    check_unchanged(identities)
    return replace(checkpoint, identities=identities)


def _files(checkpoint: Checkpoint) -> Iterator[Path]:
    """Seals that are computed on demand would read the files, as would sources; then `checkpoint.files` are all."""
    yield from (file.path for file in checkpoint.files)
    if isinstance(checkpoint.seals, (tuple, list)):
        yield from (seal.path for seal in checkpoint.seals)
        yield from (blob.path for *_, tensor in checkpoint.tensors() for blob in tensor.sources())
