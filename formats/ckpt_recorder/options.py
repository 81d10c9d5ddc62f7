"""The options of a recorder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

WhenBroken = Literal["warn", "raise"]


class RecorderWarning(UserWarning):
    """The recording has stopped, and training continues."""


@dataclass(frozen=True)
class RecorderOptions:
    """The options of a recorder."""

    codec: str = "exact"
    """`exact`; or `bf16` or `int8`, which round the gradients: restored states are then approximate."""
    base: int | Literal["auto", "rolling", "at once"] = 0
    """The number of steps between states that the log stores; 0: only the one at its start. `"auto"`: the number with
    the lowest waste for the times that the run measures, and `mtbf`. Training stops while such a state is stored.
    It goes on with `"rolling"` and `"at once"`, which copy the state in the background: piece by piece after several
    steps, or all of one step, for which the next update waits."""
    base_every: int | Literal["auto"] = 1000
    """The number of steps between bases that are copied in the background; `"auto"`: as for `base`."""
    base_spread: int = 100
    """The number of steps over which a rolling base is copied; at most `base_every`."""
    base_memory: int = 256 << 20
    """The maximum size in bytes of the buffer for pieces of such a base. It has room for four chunks in any case."""
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
    rename: Callable[[str], str] | None = None
    """Returns the name in the log of a parameter or buffer, from its name in this rank's model: for ranks that have
    parts of one model under the same names, such as stages of a pipeline."""
