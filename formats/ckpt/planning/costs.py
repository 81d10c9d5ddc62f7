"""What a run costs: the figures that a plan is computed from. Each class refuses figures that make no sense."""

import math
from dataclasses import dataclass, fields

from ckpt_formats.core.errors import UnsupportedError

_MAX_SECONDS = 1e12
"""No duration of a run is longer: thirty thousand years."""
_MAX_AMOUNT = 1e30
"""Of bytes, parameters, and either a second."""


@dataclass(frozen=True)
class RunCosts:
    """A run that stores bases. All fields are in seconds.

    Raises `UnsupportedError` for a figure that is negative or not finite, and for failures that come faster than
    restarts.
    """

    step: float
    """The time of a step, without checkpoints and without a log."""
    mtbf: float
    """The mean time between failures of the whole job, not of one machine."""
    base_stall: float
    """The time that training stops for a base."""
    restart: float = 0.0
    """The time from a failure to the first new step, with loading the base and without the replay of logged steps."""
    base_delay: float = 0.0
    """The time after its stall until a base can be restored: the rest of it is written in the background."""

    def __post_init__(self) -> None:
        _check(self, _MAX_SECONDS, positive=("step", "mtbf"))
        if self.mtbf <= self.restart:
            raise UnsupportedError(
                f"a restart takes {self.restart:g} s, but a failure comes every {self.mtbf:g} s: the run would hardly "
                "ever make a step",
                where="restart",
                hint="State the mean time between failures of the whole job, and a restart that is shorter.",
            )


@dataclass(frozen=True)
class LogCosts:
    """What a log of gradients adds to a run. Raises `UnsupportedError` for a figure that is negative or not finite."""

    replay: float
    """Seconds to replay one step: to read, decode and apply its gradients."""
    slowdown: float = 0.0
    """The share by which recording slows each step: 0.01 for 1 %."""
    flush_stall: float = 0.0
    """Seconds that training stops for a flush of the log."""

    def __post_init__(self) -> None:
        _check(self, _MAX_SECONDS)


@dataclass(frozen=True)
class DataRates:
    """How many bytes a run writes, and how fast. None: not known, so not limited and not reported.

    Raises `UnsupportedError` for a figure that is negative or not finite.
    """

    base_nbytes: float | None = None
    """The stored bytes of a base."""
    step_nbytes: float | None = None
    """The bytes that a step adds to the log, of all ranks."""
    write_rate: float | None = None
    """Bytes a second that can be written, by all ranks together."""
    read_rate: float | None = None
    """Bytes a second that can be read while a log is replayed."""
    parameters: float | None = None
    """The number of parameters that the optimizer steps."""
    replay_rate: float | None = None
    """Parameters a second that one core replays."""
    cores: float = 1.0
    """The number of cores that replay."""

    def __post_init__(self) -> None:
        positive = ("write_rate", "read_rate", "parameters", "replay_rate", "cores")
        _check(self, _MAX_AMOUNT, positive)

    @property
    def replay_parts(self) -> tuple[float | None, float | None]:
        """Seconds to read a step, and to decode and apply it; None for what is not known."""
        reading = _quotient(self.step_nbytes, self.read_rate)
        applying = _quotient(self.parameters, self.replay_rate)
        return reading, None if applying is None else applying / self.cores

    @property
    def replay(self) -> float | None:
        """Seconds to replay a step: reading and computing overlap, so the slower of both. None if both are unknown."""
        return max((part for part in self.replay_parts if part is not None), default=None)


def _quotient(amount: float | None, rate: float | None) -> float | None:
    return None if amount is None or rate is None else amount / rate


def _check(costs: RunCosts | LogCosts | DataRates, largest: float, positive: tuple[str, ...] = ()) -> None:
    """Raise `UnsupportedError` unless all fields are finite, at most `largest`, and not negative; or above 0."""
    for one in fields(costs):
        value = getattr(costs, one.name)
        if value is None:
            continue
        bound = "above 0" if one.name in positive else "0 or more"
        if not math.isfinite(value) or value < 0 or value > largest or (value == 0 and one.name in positive):
            raise UnsupportedError(
                f"{value!r} cannot be the value of `{one.name}`: it must be a number {bound}, at most {largest:g}",
                where=one.name,
                hint="Durations are in seconds, amounts in bytes or parameters, rates in either a second.",
            )
