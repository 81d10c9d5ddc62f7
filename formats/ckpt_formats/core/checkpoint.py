"""What a checkpoint is, and what a format must do."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Evidence, Seal
from ckpt_formats.core.identity import Identities, Identity, check_unchanged, recording
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.keys import StateKeys

Role = Literal["parameter", "frozen", "buffer", "extra"]
ErrorFigures = Mapping[str, Value]
"""What is promised, and what was measured, of values that are not those once saved: numbers by name."""

MASTER = "fp32"
"""The state that the optimizer updates; named for what it nearly always is."""
MODEL = "param"
"""The state that the model computes with."""


@dataclass(frozen=True)
class Parameter:
    """One named tensor of the model with all that the optimizer keeps of it.

    `states` maps `fp32` (the master), `param` (the model's copy), and the
    optimizer's own names (`exp_avg`, ...) to tensors. `values` holds what is
    kept of it as plain numbers, such as `step`. A tensor that belongs to no
    module, such as a saved RNG state, has the role `extra`.
    """

    name: str
    role: Role
    states: Mapping[str, Tensor]
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.states.values())

    @property
    def weight(self) -> Tensor:
        """What the model computes with: the model's copy, else the master."""
        return next(self.states[state] for state in (MODEL, MASTER, *self.states) if state in self.states)


@dataclass(frozen=True)
class Group:
    """One parameter group of the optimizer: its options, and the names of its parameters in order."""

    options: Mapping[str, Value]
    names: tuple[str, ...]


@dataclass(frozen=True)
class SourceFile:
    """One file of a checkpoint, and which rank's it is (`{"dp": 0, "tp": 1}`)."""

    path: Path
    nbytes: int
    role: str
    rank: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """Who wrote the checkpoint, and how it was laid out."""

    engine: str
    version: str | None = None
    step: int | None = None
    layout: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class OriginalForm:
    """What a checkpoint was before it was written in a format of ours, so that it can become that again."""

    format: str
    file: str | None = None
    """The name of its file, if it was a single one."""
    form: Callable[[], Value] | None = None
    """Gives what the format notes of its own file beyond what a checkpoint says, and it alone reads."""


@dataclass(frozen=True)
class Checkpoint:
    """The index of a checkpoint. Reading one opens headers, never tensor data.

    `aliases` maps the other names of tied tensors to the name that holds the
    values. Tensors inside `extras` are `TensorName`s of parameters of the role
    `extra`. `seals` are all checksums that the files promise. `notices` are
    things worth telling the user which are no error. `suspicions` are signs that the
    values are not what the engine meant to save: `verify` finds them, and nothing
    is written of such a checkpoint. `layout` says how the ranks' tensors were cut.
    `digests` are the XXH3-128 hashes that are promised for values which are stored
    coded, by parameter and state. `errors` tells of the states that are approximate,
    by the same; of a checkpoint with none every bit is as it was saved. `original` is
    what it was in, or was in before it was written in the universal format.
    `identities` are those of all its files, as they were when they were first opened.
    """

    path: Path
    origin: Origin
    parameters: Mapping[str, Parameter]
    groups: tuple[Group, ...] = ()
    extras: Mapping[str, Value] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    seals: Sequence[Seal] = ()
    notices: tuple[Notice, ...] = ()
    suspicions: tuple[str, ...] = ()
    layout: Layout = field(default_factory=Layout)
    digests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    errors: Mapping[tuple[str, str], ErrorFigures] = field(default_factory=dict)
    original: OriginalForm | None = None
    identities: Identities = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[Parameter, str, Tensor]]:
        """Every state of every parameter."""
        for parameter in self.parameters.values():
            for state, tensor in parameter.states.items():
                yield parameter, state, tensor

    def dangling_names(self) -> Iterator[tuple[str, str]]:
        """Names that no parameter has, though something speaks of them: (name, what is said of it)."""
        for alias, name in self.aliases.items():
            if name not in self.parameters:
                yield alias, f"tied to `{name}`, which is not there"
        for i, group in enumerate(self.groups):
            for name in group.names:
                if name not in self.parameters:
                    yield name, f"in optimizer group {i}, but not there"


@dataclass(frozen=True)
class ReadOptions:
    """What a reader may need to be told."""

    rules: tuple[Rule, ...] = ()
    order: tuple[str, ...] = ()
    """The names of the parameters that an optimizer knows by number, from 0 on."""
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for each of several optimizers, by their places in the file, such as `optimizer_states.0`."""
    shapes: Path | None = None
    """Another checkpoint of the same model, where the one to be read holds flat slices without their shapes."""


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """Over how many ranks a checkpoint is to be cut. None: as the source is, or not at all."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    """The ZeRO stage. Of Megatron, 1 is its distributed optimizer."""
    vpp: int | None = None
    """Model chunks of each pipeline stage."""
    ep: int | None = None
    """Expert-parallel ranks."""
    etp: int | None = None
    """Tensor-parallel ranks of each expert."""
    stages: tuple[int, ...] | None = None
    """The first layer of each pipeline stage."""


@dataclass(frozen=True)
class Goal:
    """Where a checkpoint is to be written, and what a format may need to be told."""

    target: Path
    degrees: ParallelDegrees = ParallelDegrees()
    rules: tuple[Rule, ...] = ()
    """The user's, before those of the source."""
    vocab_rows: int | None = None
    """Rows of the vocabulary's tables with their padding; None: as the source has them."""
    shard_nbytes: int = 5 << 30
    """About how large the files become, in formats that cut a model into several."""
    config: Path | None = None
    """A model's configuration, or the folder that holds it; None: what came with the source."""
    keys: StateKeys | None = None
    """How a tree of state dicts is to be keyed; None: as the source was."""
    coding: EncodingOptions | None = None
    """How states are to be coded, in formats that can; None: their values are stored as they are."""
    partial: bool = False
    """The user left tensors of the source out: that some are missing is no error."""
    as_it_was: bool = False
    """Write what the source was (`Checkpoint.original`), in formats that can; else what the format writes of all."""


@dataclass(frozen=True)
class FilePlan:
    """One output file: all it takes to write it, in any process."""

    file: str
    parameters: tuple[Parameter, ...]
    what: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None
    """Of the file, where it is known and is not the sum of the parameters."""
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
class Receipt:
    """What became of a part: plain data, small, and enough to check the file again."""

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


def identified(read: Callable[[], Checkpoint]) -> Checkpoint:
    """What `read` returns, with the identities of all files that it is in.

    Raises `Corrupt` if one of them was changed meanwhile.
    """
    with recording() as identities:
        found = read()
    for file in dict.fromkeys(_files(found)):
        if file not in identities:
            with suppress(OSError):  # who reads it says that it is missing
                identities[file] = Identity.of(file.stat())
    check_unchanged(identities)
    return replace(found, identities=identities)


def _files(checkpoint: Checkpoint) -> Iterator[Path]:
    """Where seals are made when they are asked for, so are sources, by reading; there all files are shards."""
    yield from (shard.path for shard in checkpoint.files)
    if isinstance(checkpoint.seals, (tuple, list)):
        yield from (seal.path for seal in checkpoint.seals)
        yield from (raw.path for *_, tensor in checkpoint.tensors() for raw in tensor.sources())


class WritableFormat(Format):
    """A format that can also be written, in three steps: plan, write each part, commit.

    `degrees` names the fields of `ParallelDegrees` that the format can follow.

    Laws: `plan` is pure. `write` touches only its own part's file, may be run
    again, and in any order. `commit` runs once, last, and writes what makes the
    folder recognisable; until then `detect` refuses it.
    """

    degrees: ClassVar[tuple[str, ...]] = ()
    needs_model: ClassVar[bool] = True
    """Is a checkpoint without weights of a model nothing that the format can hold?"""

    @abstractmethod
    def plan(self, source: Checkpoint, goal: Goal) -> tuple[FilePlan, ...]:
        """The files to write. Raises `Unsupported` for tensors that the format cannot hold."""

    @abstractmethod
    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        """Write one file of the new checkpoint into `folder`."""

    @abstractmethod
    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """Make the folder a checkpoint. `receipts` are in the order of the plan."""

    def product(self, target: Path) -> str | None:
        """The name, within the folder, of the one file that is the checkpoint; None if the folder is."""
        return None

    def settings(self) -> object:
        """Plain data that tells this object from others of its class which write other bytes."""
        return ()

    def beside(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that are read besides the source."""
        return ()

    def losses(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str | Notice, ...]:
        """What of the source the format has no place for, in words that follow these."""
        return ()

    def remarks(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str | Notice, ...]:
        """What the user should know of the result before it is written, in sentences."""
        return ()
