"""What a delta codec is: it takes the states of a parameter from one step of a run to a later one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from ckpt_codecs.base import Array, DType, Shape

States = Mapping[str, Array]
"""A chunk of each state of one parameter, all of one shape: `fp32`, `param`, `exp_avg`, `exp_avg_sq`, ..."""
StateTypes = Mapping[str, DType]
"""The states that a chunk holds, and their types."""


@dataclass(frozen=True)
class StepInfo:
    """What is known of the way between two states of a run.

    `options` are those of the optimizer's group at the later state (`lr`,
    `betas`, `eps`, `weight_decay`, ...), as far as they are plain numbers or
    lists of them; `before` and `after` are the numbers of optimizer steps, None
    where nobody knows.
    """

    before: int | None = None
    after: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StatePair:
    """The same chunk of one parameter at two steps. `before` may lack states that `after` has: all, in an anchor."""

    before: States
    after: States


@dataclass(frozen=True)
class DeltaCodec(ABC):
    """Encodes a chunk of all states of a parameter against the same chunk of an earlier state.

    The states are coded together since they tell of each other: Adam's new
    weights follow from the old ones and from the new moments.

    Law of configuration: as of `Codec`; what was fitted to one parameter is part of it.
    Law of exactness: if `lossless`, then `decode(encode(change), ...) == change.after`,
    bit for bit, whatever the two have to do with each other.
    Law of determinism: `decode` gives the same bits on every machine, at every
    level of its kernels, so that a later delta can be coded against it.
    Law of promises: what a lossy codec was told to keep, `broken_promise` finds kept in all that it decodes.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> "DeltaCodec":
        """The same codec with what it must know of the whole state. Asked once for each delta, before `fit`.

        Of each parameter that it will be given, `samples` has the number of elements, and one chunk.
        """
        return self

    def warning(self, step: StepInfo) -> str | None:
        """What the user of this codec should know about this run, if anything."""
        return None

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "DeltaCodec":
        """The same codec with what it must know of one parameter. `changes` gives chunks of it, anew at each call."""
        return self

    @abstractmethod
    def encode(self, change: StatePair) -> bytes:
        """Bytes for a chunk. Raises `NotApplicable` if this codec cannot hold these values."""

    @abstractmethod
    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        """The chunk's states of the later step, or those that are wanted and no more work than they take.

        `data` is hostile: raises `CodecError`, never takes more memory than `shape` and `form` earn.
        """

    def promised(self, state: str, form: StateTypes) -> Mapping[str, float]:
        """What a manifest says is promised of a state of a parameter with these states: numbers by name."""
        return {}

    def broken_promise(self, change: StatePair, made: States) -> str | None:
        """Which promise the states that came out for a chunk do not keep; None if all hold."""
        return None

    def config(self) -> dict[str, Any]:
        """This codec as JSON; `from_config` makes it again."""
        return {"name": self.name, **asdict(self)}
