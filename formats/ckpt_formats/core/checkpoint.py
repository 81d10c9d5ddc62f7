"""What a checkpoint is: parameters with their states, and everything else that was saved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckpt_formats.core.arguments import MAX_INTEGER, Checked, checked
from ckpt_formats.core.claims import MAX_RANKS
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, at_tensor
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.short_repr import ShortRepr, cut, short_repr
from ckpt_formats.core.similar_names import UnknownNameError
from ckpt_formats.core.state_names import MASTER as MASTER
from ckpt_formats.core.state_names import MODEL as MODEL
from ckpt_formats.core.state_names import STORED_MASTER, STORED_MODEL, States, renamed
from ckpt_formats.core.tensor import Array, BlockIndexer, FlatIndexer, Tensor, block_to_torch
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, brief

if TYPE_CHECKING:
    from ckpt_formats.core.interchange import TorchTensor

Role = Literal["parameter", "frozen", "buffer", "extra"]
_ROLES = get_args(Role)
ErrorFigures = Mapping[str, Value]
"""The errors of approximate values, promised and measured: numbers by name."""
_COUNT = "step"
"""What torch calls the state that counts the optimizer's steps."""
OLDER = "older"
"""In error figures: how many elements of a state are of an earlier step than the checkpoint, on purpose."""
OLDEST_STEP = "oldest_step"
"""In error figures: the earliest of these steps."""


@dataclass(frozen=True)
class Parameter(Checked):
    """One named tensor of the model, with its optimizer states.

    `states` maps `master` (what the optimizer updates), `model` (what the model computes with), and the
    optimizer's own names (`exp_avg`, ...) to tensors. `values` has the states
    that are plain numbers, such as `step`. A tensor that belongs to no module,
    such as a saved RNG state, has the role `extra`.
    """

    name: str
    role: Role
    states: Mapping[str, Tensor]
    values: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A checkpoint has hundreds of thousands: nearly all pass here.
        states, usual = self.states, type(self.name) is str and type(self.values) is dict
        if type(states) is dict:
            object.__setattr__(self, "states", States(states))
        elif type(states) is not States:
            usual = False
        if not (usual and type(self.role) is str and self.role in _ROLES):
            super().__post_init__()
        if STORED_MODEL in states or STORED_MASTER in states:
            stored = STORED_MODEL if STORED_MODEL in states else STORED_MASTER
            raise InvalidArgumentError(f"`{printable(self.name)}`: {renamed(stored)}")

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for tensor in self.states.values())

    @property
    def shape(self) -> Shape:
        """The shape of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> DType:
        """The element type of the weight."""
        return self.weight.dtype

    def __getitem__(self, key: Any) -> Array:
        """A block of the weight, by NumPy's basic indexing: an array of the weight's dtype. Only this block is read."""
        return self.weight[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The weight, read into memory: `np.asarray(parameter)`."""
        return self.weight.__array__(dtype, copy)

    def __dlpack__(self, **options: Any) -> Any:
        """The weight, read into memory, for `torch.from_dlpack(parameter)` and others. See `Tensor.__dlpack__`."""
        return self.weight.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The processor's memory, in the terms of DLPack: (1, 0)."""
        return self.weight.__dlpack_device__()

    def torch(self, key: Any = ..., *, mmap: bool = False) -> "TorchTensor":
        """Return a block of the weight, or all of it, as a tensor of torch. See `Tensor.torch`."""
        return self.weight.torch(key, mmap=mmap)

    @property
    def block(self) -> BlockIndexer:
        """Blocks of the weight as lazy tensors: `parameter.block[10:20, :]`. See `Tensor.block`."""
        return self.weight.block

    @property
    def flat(self) -> FlatIndexer:
        """Ranges of the weight's elements as lazy vectors: `parameter.flat[low:high]`. See `Tensor.flat`."""
        return self.weight.flat

    def mapped(self, key: Any = ...) -> Array | None:
        """A block of the weight where it lies in a file, without a copy; None if it does not. See `Tensor.mapped`.

        The array has the shape that the key selects (any shape), and the weight's dtype.
        """
        return self.weight.mapped(key)

    @property
    def count(self) -> int | float | None:
        """How many steps its optimizer has taken with it: a finite number as it is stored. None if none is stored.

        Some formats store it as a plain number in `values`, others as a state of one element, which is read.
        Raises `CkptError` if the state cannot be read, `CorruptError` if it is no number of steps.
        """
        count: Any = self.values.get(_COUNT)
        if count is None:
            tensor = self.states.get(_COUNT)
            if tensor is None or tensor.size != 1:
                return None
            with at_tensor(printable(self.name)):
                value = tensor[(0,) * len(tensor.shape)]
            count = int(value) if tensor.dtype.kind in "iu" else float(value)
        if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 <= count < MAX_INTEGER:
            raise CorruptError(f"`{printable(self.name)}` states {brief(count)} as its number of steps")
        return count

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from ckpt_formats.core.notebook import of_parameter

        return of_parameter(self)

    @property
    def weight(self) -> Tensor:
        """The tensor that the model computes with: the model's copy, else the master, else the first state."""
        states = self.states
        if MODEL in states:
            return states[MODEL]
        return states[MASTER] if MASTER in states else next(iter(states.values()))


@dataclass(frozen=True)
class Group:
    """One parameter group of the optimizer: its options, and the names of its parameters in order."""

    options: Mapping[str, Value]
    names: tuple[str, ...]

    __repr__ = short_repr


@dataclass(frozen=True)
class SourceFile:
    """One file of a checkpoint, and the rank that wrote it (`{"dp": 0, "tp": 1}`)."""

    path: Path
    nbytes: int
    role: str
    rank: Mapping[str, int] = field(default_factory=dict)

    __repr__ = short_repr


_DEGREES = ("tp", "pp", "dp", "ep", "etp", "vpp", "world", "zero_stage", "experts")
"""The entries of a layout that are numbers: of ranks, of what is divided among them, and the stage of ZeRO."""


@dataclass(frozen=True)
class Origin:
    """Which engine wrote the checkpoint, at which step, and with which layout over ranks."""

    engine: str
    version: str | None = None
    step: int | None = None
    layout: Mapping[str, Value] = field(default_factory=dict)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Raise `CorruptError` for a number of ranks that is none: files state them, and targets are made by them."""
        for name in _DEGREES:
            value = self.layout.get(name)
            if not (value is None or (type(value) is int and 0 <= value <= MAX_RANKS)):
                raise CorruptError(f"origin.layout: `{name}` is {brief(value)}, but must be from 0 to {MAX_RANKS:,}")


@dataclass(frozen=True)
class OriginalForm:
    """The format of a checkpoint before it was written in a format of ckpt, so that it can be written in that again."""

    format: str
    file: str | None = None
    """The name of its file, if it was a single one."""
    form: Callable[[], Value] | None = None
    """Returns what the format notes about its own file beyond the checkpoint. Only that format reads it."""

    __repr__ = short_repr


@dataclass(frozen=True)
class Edit(ShortRepr):
    """One step of a checkpoint's history: plain data, by which a job is recognised when it runs again."""

    def inputs(self) -> tuple[Path, ...]:
        """The paths of other checkpoints that it reads."""
        return ()


@dataclass(frozen=True)
class Opened(Edit):
    """The checkpoint was opened from files. `options` are those of its reader."""

    path: Path
    options: object


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint(Checked, Mapping[str, Parameter]):
    """The index of a checkpoint: parameters by name. To read one opens headers, never tensor data.

    As a mapping, it has the parameters of the model, without those of the role `extra`;
    a tied parameter can be looked up under each of its names. The methods that edit it
    return another checkpoint, and read nothing. Two checkpoints are equal only if they
    are the same object.

    What it is:

    aliases     the other names of tied tensors, each with the name of the parameter
    extras      all other items; tensors in them are `TensorName`s of parameters of the role `extra`
    files       the files that it was read from
    notices     what the user should know, and what is no error
    history     where it was opened, and how it was edited

    What its files promise, which readers state and `save`, `verify` and `diff` use:

    seals       all checksums of ranges of files
    digests     the XXH3-128 of values that are stored encoded, by (parameter, state)
    errors      the errors of approximate states, by (parameter, state); without any, every bit
                is as it was saved
    suspicions  signs that the values are not those that the engine meant to save: `verify` reports
                them, and such a checkpoint is not written
    layout      how the ranks' tensors were sharded
    original    the format that it is in, or was in before it was written in the universal format
    identities  those of all its files, when they were first opened
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
    history: tuple[Edit, ...] = ()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Parameter:
        try:
            return self.parameters[self.aliases.get(name, name)]
        except KeyError:
            raise UnknownNameError(name, self.parameters.keys()) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name, parameter in self.parameters.items() if parameter.role != "extra")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Checkpoint {cut(str(self.path), 120)}: {self.format}, step {self.step}, {len(self)} parameters>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from ckpt_formats.core.notebook import of_checkpoint

        return of_checkpoint(self)

    @property
    def step(self) -> int | None:
        """The step of the run at which it was saved."""
        return self.origin.step

    @property
    def format(self) -> str:
        """The name of the format that it is in, or was in before it was written in the universal format."""
        return self.original.format if self.original is not None else "universal"

    @property
    def is_partial(self) -> bool:
        """Whether an edit left parameters out. Then missing ones are no error."""
        from ckpt_formats.core import edits

        return any(isinstance(edit, edits.Select) for edit in self.history)

    @checked
    def select(self, only: Sequence[str] = (), skip: Sequence[str] = ()) -> "Checkpoint":
        """The parameters whose names match one of `only` (all, if empty) and none of `skip`. Extras stay.

        Patterns are regular expressions, searched anywhere in a name. Raises `NoMatchError` for one that matches
        nothing.
        """
        from ckpt_formats.core import edits

        return edits.select(self, only, skip)

    def weights_only(self) -> "Checkpoint":
        """The model's own tensors and the extras that state its sizes, without optimizer, masters and other extras."""
        from ckpt_formats.core import edits

        return edits.weights_only(self)

    def without_optimizer(self) -> "Checkpoint":
        """The model and all extras, such as the step and arguments, without what belongs to an optimizer.

        Its states, groups, schedule and loss scaler are left out. Weights are those that `weights_only` has.
        """
        from ckpt_formats.core import edits

        return edits.without_optimizer(self)

    @checked
    def cast(self, dtype: str, allow_overflow: bool = False) -> "Checkpoint":
        """The model's floating-point weights rounded to `dtype` (`fp32`, `bf16`, ...), to nearest; other states stay.

        Numbers that are too large for `dtype` become infinite or NaN, and too small ones zero. Both are counted when
        the values are read, and are in the notes of `Result`. To a type of 8 bits, an overflow is refused unless
        `allow_overflow` is set. Quantised weights become plain ones, and a notice says so; small tensors that describe
        them are read for it.

        Raises `InvalidArgumentError` if `dtype` is no floating-point type of weights, `UnsupportedError` for quantised
        weights of a scheme that is not decoded, and when values are read that overflow and must not.
        """
        from ckpt_formats.core import edits

        return edits.cast(self, dtype, allow_overflow)

    @checked
    def quantise(self, scheme: str, plain: Sequence[str] = ()) -> "Checkpoint":
        """The matrices of linear layers as codes and scales: `fp8-block` or `mxfp4`.

        `fp8-block` is FP8 with a scale for 128 x 128. `mxfp4` has an exponent for 32 values of a row; of GPT-OSS, only
        the experts get it. Embeddings, the head, routers, norms, and parameters whose names match one of `plain` stay
        as they are. The model's configuration states the quantisation.

        Raises `InvalidArgumentError` for an unknown scheme, `NoMatchError` for a pattern that matches nothing,
        `UnsupportedError` for optimizer states and weights that are quantised already, and when values are read that
        are NaN or infinite.
        """
        from ckpt_formats.core.quantised.quantise import quantised  # no other edit needs its codes

        return quantised(self, scheme, plain)

    @checked
    def rename(self, names: Mapping[str, str] | Callable[[str], str]) -> "Checkpoint":
        """Other names for parameters, by a mapping or a function; a name that a mapping leaves out stays.

        Raises `NoMatchError` for a name that no parameter has, `InvalidArgumentError` if two would get the same name.
        """
        from ckpt_formats.core import edits

        return edits.rename(self, names)

    @checked
    def replace(self, arrays: Mapping[str, Any], *, new_names: bool = False, new_shapes: bool = False) -> "Checkpoint":
        """Other values for weights: arrays of the same shapes, of any dtype. Their optimizer states are dropped.

        With `new_names`, a name that no parameter has becomes a new parameter; with `new_shapes`, arrays may have other
        shapes. Raises `NoMatchError` and `InvalidArgumentError` where this is not allowed.
        """
        from ckpt_formats.core import edits

        return edits.replace_values(self, arrays, new_names, new_shapes)

    def missing_in(self, model: Any) -> list[str]:
        """Return the names of weights and buffers that a model does not have: torch calls them unexpected keys.

        `model` is a module of torch, a state dict, another checkpoint, or names. `ckpt.check` compares both ways, and
        shapes.
        """
        keys = model.state_dict() if hasattr(model, "state_dict") and not isinstance(model, Checkpoint) else model
        known = {*keys, *getattr(keys, "aliases", ())}
        return [name for name in dict.fromkeys((*self, *self.aliases)) if name not in known]

    def state_dict(self, *, mmap: bool = False) -> "dict[str, TorchTensor]":
        """Return the model's weights and buffers as tensors of torch by name, for `module.load_state_dict(...)`.

        Tied parameters have all their names, and share one tensor. Torch is imported now. Without `mmap`, all are read
        into memory; with `mmap`, tensors that lie in one piece of a local file are mapped, as in `Tensor.torch`.

        Raises `UnsupportedError` if torch or a dtype is missing, `IncompleteError` for blocks that no file has, and
        `CorruptError` if a file was replaced since the checkpoint was opened. Checksums are not compared: see
        `ckpt.verify`.
        """
        from ckpt_formats.core.interchange import MappedFiles

        files = MappedFiles(self.identities) if mmap else None
        state: dict[str, TorchTensor] = {}
        for name in self:
            with at_tensor(printable(name)):
                state[name] = block_to_torch(self[name].weight, ..., files, self.identities)
        return state | {alias: state[name] for alias, name in self.aliases.items() if name in state}

    def tensors(self) -> Iterator[tuple[Parameter, str, Tensor]]:
        """Every state of every parameter."""
        for parameter in self.parameters.values():
            for state, tensor in parameter.states.items():
                yield parameter, state, tensor

    def dangling_names(self) -> Iterator[tuple[str, str]]:
        """Names that are referred to and that no parameter has: pairs of the name and what refers to it, as text."""
        for alias, name in self.aliases.items():
            if name not in self.parameters:
                yield alias, f"is tied to `{name}`, which the checkpoint does not have"
        for i, group in enumerate(self.groups):
            for name in group.names:
                if name not in self.parameters:
                    yield name, f"is in optimizer group {i}, but not in the checkpoint"


def opened_path(checkpoint: Checkpoint) -> Path:
    """The path under which it was opened: of a state of a chain, with its step."""
    return next((edit.path for edit in checkpoint.history if isinstance(edit, Opened)), checkpoint.path)
