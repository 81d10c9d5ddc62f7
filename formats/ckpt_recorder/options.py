"""The options of a recorder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckpt.holding.peers import Peers
from ckpt_formats.core.errors import InvalidArgumentError

WhenBroken = Literal["warn", "raise"]


class RecorderWarning(UserWarning):
    """The recording has stopped, and training continues."""


@dataclass(frozen=True)
class Bases:
    """When a recorder stores the whole state as a base, besides the one at the start of the log.

    Raises `InvalidArgumentError` if a field has a value that it cannot have.
    """

    every: int | Literal["auto"] = 0
    """The number of steps between bases; 0: only the one at the start. `"auto"`: the number with the lowest waste for
    the times that the run measures, and `mtbf`."""
    spread: int = 0
    """The number of steps over which a base is copied in the background, piece by piece; at most `every`. With 1, the
    whole state is copied after one step, and the next update waits for it. With 0, training stops for each base."""
    memory: int = 256 << 20
    """The maximum size in bytes of the buffer for pieces of bases in the background. It has room for four chunks in any
    case."""

    def __post_init__(self) -> None:
        check_interval("bases.every", self.every, min(self.spread, 1) if isinstance(self.spread, int) else 0)
        for name, value, minimum in (("bases.spread", self.spread, 0), ("bases.memory", self.memory, 1)):
            if not isinstance(value, int) or value < minimum:
                raise InvalidArgumentError(
                    f"{value!r} cannot be `{name}`", where=name, hint=f"Give a number of at least {minimum}."
                )


def check_interval(option: str, value: object, minimum: int) -> None:
    """Raise `InvalidArgumentError` unless a value is a number of steps, or `"auto"`."""
    if value != "auto" and not (isinstance(value, int) and value >= minimum):
        raise InvalidArgumentError(
            f"{value!r} cannot be `{option}`", where=option, hint='Give a number of steps, or "auto".'
        )


@dataclass(frozen=True)
class RecorderOptions:
    """The options of a recorder."""

    codec: str = "exact"
    """`exact`; or `bf16` or `int8`, which round the gradients: restored states are then approximate."""
    bases: Bases = Bases()
    """When the log stores whole states."""
    flush: int | Literal["auto"] = 8
    """The number of steps between flushes to the disk, or `"auto"`. Only a crash of the machine loses steps after the
    last flush."""
    mtbf: float | None = None
    """The mean seconds between failures of the whole job. `"auto"` needs it."""
    flush_seconds: float = 10.0
    """The maximum number of seconds between flushes."""
    slots: int = 3
    """The number of steps in the ring before training waits for the writer. Each takes the memory of the gradients."""
    stall_seconds: float = 300.0
    """The time that training waits for a writer without progress, before the recording counts as broken; and that a
    rank waits for the others at the start."""
    fingerprint: int = 100
    """The number of steps between hashes of the full state, which a replay compares; 0: only at both ends."""
    prove: bool = True
    """Replay the log beside the run in a process of low priority, and compare it with the run. It takes the memory of
    the states. Without it only single steps are proved."""
    random_states: bool = True
    """Store the states of all random number generators with each step."""
    when_broken: WhenBroken = "warn"
    """`raise` stops training if the log cannot be written; `warn` continues without the log."""
    retry: int = 100
    """The number of steps after which a broken recording starts again; 0: never."""
    peers: Peers | None = None
    """The hosts that hold the log in memory, besides the chain."""
    rename: Callable[[str], str] | None = None
    """Returns the name in the log of a parameter or buffer, from its name in this rank's model: for ranks that have
    parts of one model under the same names, such as stages of a pipeline."""
