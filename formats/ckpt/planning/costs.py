"""What a run costs: the figures that a plan is computed from. Each class refuses figures that make no sense."""

from dataclasses import dataclass
from typing import Annotated

from ckpt_formats.core.arguments import Checked, Range
from ckpt_formats.core.errors import InvalidArgumentError

_MAX_SECONDS = 1e12
"""No duration of a run is longer: thirty thousand years."""
_MAX_AMOUNT = 1e30
"""Of bytes, parameters, and either a second."""
_Seconds = Annotated[float, Range(0, _MAX_SECONDS)]
_Duration = Annotated[float, Range(0, _MAX_SECONDS, above=True)]
_Amount = Annotated[float, Range(0, _MAX_AMOUNT)]
_Rate = Annotated[float, Range(0, _MAX_AMOUNT, above=True)]


@dataclass(frozen=True)
class RunCosts(Checked):
    """A run that stores bases. All fields are in seconds.

    Raises `InvalidArgumentError` for a figure that is negative or not finite, and for failures that come faster than
    restarts.
    """

    step: _Duration
    """The time of a step, without checkpoints and without a log."""
    mtbf: _Duration
    """The mean time between failures of the whole job, not of one machine."""
    base_stall: _Seconds
    """The time that training stops for a base."""
    restart: _Seconds = 0.0
    """The time from a failure to the first new step, with loading the base and without the replay of logged steps."""
    base_delay: _Seconds = 0.0
    """The time after its stall until a base can be restored: the rest of it is written in the background."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mtbf <= self.restart:
            raise InvalidArgumentError(
                f"a restart takes {self.restart:g} s, but a failure comes every {self.mtbf:g} s: the run would hardly "
                "ever make a step",
                where="restart",
                hint="State the mean time between failures of the whole job, and a restart that is shorter.",
            )


@dataclass(frozen=True)
class LogCosts(Checked):
    """What a log of gradients adds to a run. Raises `InvalidArgumentError` for a negative or infinite figure."""

    replay: _Seconds
    """Seconds to replay one step: to read, decode and apply its gradients."""
    slowdown: _Seconds = 0.0
    """The share by which recording slows each step: 0.01 for 1 %."""
    flush_stall: _Seconds = 0.0
    """Seconds that training stops for a flush of the log."""


@dataclass(frozen=True)
class DataRates(Checked):
    """How many bytes a run writes, and how fast. None: not known, so not limited and not reported.

    Raises `InvalidArgumentError` for a figure that is negative or not finite.
    """

    base_nbytes: _Amount | None = None
    """The stored bytes of a base."""
    step_nbytes: _Amount | None = None
    """The bytes that a step adds to the log, of all ranks."""
    write_rate: _Rate | None = None
    """Bytes a second that can be written, by all ranks together."""
    read_rate: _Rate | None = None
    """Bytes a second that can be read while a log is replayed."""
    parameters: _Rate | None = None
    """The number of parameters that the optimizer steps."""
    replay_rate: _Rate | None = None
    """Parameters a second that one core replays."""
    cores: _Rate = 1.0
    """The number of cores that replay."""

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
