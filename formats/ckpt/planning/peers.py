"""What states in the memory of other hosts cost, and which losses of hosts they survive.

Each scheme is judged by the same figures: the memory and the network of a host, the hosts that may be lost at once, and
the waste of the run whose states are there. Time is in seconds, data in bytes.

A host holds two generations of states, because the older one may go only when the newer one is whole on all hosts
(Gemini, SOSP 2023, does the same).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb
from typing import Annotated

from ckpt.planning.costs import RunCosts
from ckpt.planning.schedule import Schedule, plan_schedule
from ckpt_formats.core.arguments import Checked, Count, Range, Ranks
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.parity.scheme import PeerScheme

GENERATIONS = 2
SCHEMES = ("copies:1", "copies:2", "copies:3", "parity:4+1", "parity:8+1", "parity:4+2", "parity:8+2", "parity:16+2")
"""The schemes that a plan compares if the user names none."""
RANDOM_HOSTS = (2, 3, 4, 8)
"""How many hosts at random are lost, in `PeerPlan.uncovered`."""
_Amount = Annotated[float, Range(0, 1e30)]
_Rate = Annotated[float, Range(0, 1e30, above=True)]
_Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class PeerHosts(Checked):
    """The hosts of a run, and what they can give. Raises `InvalidArgumentError` for a figure that makes no sense."""

    hosts: Ranks
    state_nbytes: _Amount
    """The bytes of a state, of all hosts together."""
    network_rate: _Rate | None = None
    """Bytes a second that a host sends and receives beside training; None: not known."""
    memory_nbytes: _Amount | None = None
    """The memory that a host has for states; None: not known."""
    together: Ranks = 1
    """Hosts of a rack, which fail together: so many in a row, the first rack from the first host on."""

    @property
    def piece_nbytes(self) -> float:
        """The part of a state that is a host's own."""
        return self.state_nbytes / self.hosts


@dataclass(frozen=True)
class PeerPlan(Checked):
    """A scheme on these hosts."""

    scheme: str
    group: Count
    """The hosts of a group of parity; the fewest for copies."""
    jump: Count
    """Hosts that hold the same are so far apart in the list of hosts, so that neighbours hold different things."""
    losses: Count
    """Any so many hosts may be lost at once."""
    neighbours: Count
    """So many neighbours may be lost at once, wherever they begin."""
    memory_nbytes: Count
    """What a host holds: copies of others' states, or its own state and parity; in two generations."""
    sent_nbytes: Count
    """What a host sends of each state."""
    send_seconds: float | None
    """How long that takes; None: the network's rate is not known."""
    uncovered: tuple[_Share, ...]
    """The probability that something is lost with 2, 3, 4 and 8 hosts at random."""
    fits: bool
    """Whether the memory suffices, as far as it is known."""
    covers: bool
    """Whether `lose` hosts may be lost, and the hosts of any rack."""
    schedule: Schedule | None
    """How often to store, and the waste; None: no run is known, or it makes no progress."""


def plan_peers(
    hosts: PeerHosts, run: RunCosts | None = None, schemes: Sequence[str] = SCHEMES, lose: int = 1
) -> tuple[PeerPlan, ...]:
    """The plans of all schemes that these hosts can have, in the order of `schemes`.

    `run`: what the run costs, with a state in memory as its base. `lose`: hosts that must be allowed to be lost.

    Raises:
        InvalidArgumentError: A text is no scheme.
        UnsupportedError: The hosts are too few for each of the schemes.
    """
    parsed = [PeerScheme.parse(scheme) for scheme in schemes]
    there = [scheme for scheme in parsed if scheme.hosts <= hosts.hosts]
    if not there:
        least = min(parsed, key=lambda scheme: scheme.hosts)
        raise UnsupportedError(
            f"{least} needs {least.hosts} hosts, but the run has {hosts.hosts}",
            where="hosts",
            hint="Give a scheme of fewer hosts; on one host, write to another file system.",
        )
    return tuple(_plan(scheme, hosts, run, lose) for scheme in there)


def recommended(plans: Sequence[PeerPlan]) -> PeerPlan | None:
    """The plan that covers what fails together and takes the least memory, then sends least; or None."""
    fitting = [plan for plan in plans if plan.covers and plan.fits]
    return min(fitting, key=lambda plan: (plan.memory_nbytes, plan.sent_nbytes, plan.group), default=None)


def largest_jump(scheme: PeerScheme, hosts: int, together: int) -> int:
    """How far hosts of a group are apart: as far as neighbours fail together, if there are so many hosts."""
    return max(1, min(together, hosts // scheme.hosts))


def _plan(scheme: PeerScheme, hosts: PeerHosts, run: RunCosts | None, lose: int) -> PeerPlan:
    own = hosts.piece_nbytes
    jump = largest_jump(scheme, hosts.hosts, hosts.together)
    memory, sent = round(GENERATIONS * scheme.memory * own), round(scheme.sent * own)
    seconds = None if hosts.network_rate is None else sent / hosts.network_rate
    return PeerPlan(
        scheme=str(scheme),
        group=scheme.hosts,
        jump=jump,
        losses=scheme.spares,
        neighbours=scheme.neighbours(hosts.hosts, jump),
        memory_nbytes=memory,
        sent_nbytes=sent,
        send_seconds=seconds,
        uncovered=tuple(
            uncovered_share(scheme, hosts.hosts, count, jump) if count <= hosts.hosts else 1.0 for count in RANDOM_HOSTS
        ),
        fits=hosts.memory_nbytes is None or memory <= hosts.memory_nbytes,
        covers=scheme.spares >= lose and scheme.covers(hosts.together, hosts.hosts, jump),
        schedule=None if run is None else _schedule(run, seconds or 0.0),
    )


def _schedule(run: RunCosts, seconds: float) -> Schedule | None:
    try:
        return plan_schedule(replace(run, base_delay=max(run.base_delay, seconds))).bases
    except UnsupportedError:
        return None


@cache
def uncovered_share(scheme: PeerScheme, hosts: int, losses: int, jump: int = 1) -> float:
    """The probability that something is lost, if `losses` of all hosts are lost at random.

    Exact: the sets of hosts that may be lost are counted. With parity, these are the coefficients of a product over all
    groups. With copies, a host and all that follow it in the circle must not be lost: so many runs of lost hosts, each
    at most `spares` long, stand between the others.
    """
    if scheme.is_copies:
        there = hosts - losses
        ways = _power([1] * (scheme.spares + 1), there, losses)
        covered = ways[losses] * hosts // there if there and losses < len(ways) else 0
    else:
        ways = [1]
        for size, count in Counter(map(len, scheme.groups(hosts, jump))).items():
            ways = _product(ways, _power(_choices(size, scheme.spares), count, losses), losses)
        covered = ways[losses] if losses < len(ways) else 0
    return 1 - covered / comb(hosts, losses)


def _choices(hosts: int, most: int) -> list[int]:
    return [comb(hosts, count) for count in range(min(most, hosts) + 1)]


def _power(polynomial: list[int], exponent: int, degree: int) -> list[int]:
    """A power of a polynomial, up to this degree."""
    result = [1]
    while exponent:
        if exponent & 1:
            result = _product(result, polynomial, degree)
        polynomial = _product(polynomial, polynomial, degree)
        exponent >>= 1
    return result


def _product(one: list[int], other: list[int], degree: int) -> list[int]:
    result = [0] * min(degree + 1, len(one) + len(other) - 1)
    for i, a in enumerate(one[: len(result)]):
        for j, b in enumerate(other[: len(result) - i]):
            result[i + j] += a * b
    return result
