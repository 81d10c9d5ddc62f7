"""Which hosts hold in memory what a host records."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.parity.scheme import ParitySet, PeerScheme, circle
from ckpt_formats.stores.address import NetworkAddress, parse_address
from ckpt_formats.stores.piece_requests import NAME

MAX_CONNECTIONS = 448
"""Of senders to a holder, beside those of readers."""
HELD = "holds all"
"""What is said of a holder that has what was recorded."""


@dataclass(frozen=True)
class Peers:
    """The hosts of a run, each with `ckpt hold`, and how many of them hold what one host records.

    Raises `InvalidArgumentError` if a field has a value that it cannot have.
    """

    hosts: Sequence[str]
    """The addresses of the holders, HOST:PORT: one for each host, in the order of the ranks."""
    scheme: str = "copies:2"
    """`copies:N`: N other hosts hold all that a host records. Any N - 1 hosts may be lost, and the chain besides.
    `parity:K+M`: each host holds what it records, and M hosts of its group hold parities of K hosts' data: any M hosts
    of a group may be lost, and the chain besides."""
    jump: int = 1
    """The distance between hosts that hold the same, or its parity: the hosts of a rack, so that no rack has all."""
    run: str | None = None
    """The name of the run, if hosts hold several; None: the name of the folder of its chain, or saves."""

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str) or not all(isinstance(host, str) for host in self.hosts):
            raise InvalidArgumentError("`hosts` is not a list of addresses", where="peers.hosts")
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if len(set(self.addresses)) < len(self.hosts):
            raise InvalidArgumentError("a host is named twice", where="peers.hosts")
        if not isinstance(self.scheme, str):
            raise InvalidArgumentError(f"{self.scheme!r:.40} cannot be `peers.scheme`", where="peers.scheme")
        if not isinstance(self.jump, int) or self.jump < 1:
            raise InvalidArgumentError(f"{self.jump!r:.40} cannot be `peers.jump`", where="peers.jump")
        if self.run is not None:
            self.run_of("")
        if not self.parsed.is_copies:
            self.parsed.groups(len(self.hosts), self.jump)  # raises: the hosts are too few
        elif self.parsed.spares >= len(self.hosts):
            raise InvalidArgumentError(
                f"{self.scheme} needs more than {self.parsed.spares} hosts, and there are {len(self.hosts)}",
                where="peers.scheme",
                hint="Name more hosts, or fewer copies.",
            )

    def run_of(self, folder: str) -> str:
        """The name of a run in a folder of this name. Raises `InvalidArgumentError` if no address can have it."""
        name = folder if self.run is None else self.run
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise InvalidArgumentError(
                f"{name!r:.80} cannot be the name of a run in the memory of peers",
                where="peers.run",
                hint="Give Peers(run=...): at most 128 letters of ASCII, digits, _, . and -, the first no . or -.",
            )
        return name

    # A sender asks for all holders of all ranks, again and again.

    @cached_property
    def parsed(self) -> PeerScheme:
        """The scheme."""
        return PeerScheme.parse(self.scheme)

    @cached_property
    def sets(self) -> tuple[ParitySet, ...]:
        """All sets of hosts with a parity; none of copies."""
        return () if self.parsed.is_copies else tuple(self.parsed.sets(len(self.hosts), self.jump))

    @cached_property
    def addresses(self) -> tuple[NetworkAddress, ...]:
        """The addresses of the holders, in the order of the hosts."""
        return tuple(map(parse_address, self.hosts))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The hosts in the order in which each gives its copies to those that follow it, in a circle."""
        return circle(len(self.hosts), self.jump)

    @cached_property
    def _senders(self) -> int:
        """How many hosts send to a holder, at most."""
        counts = Counter(one for host in range(len(self.hosts)) for one in self.holders_of(host))
        counts.update(one for host in range(len(self.hosts)) for one in self.parities_of(host))
        return max(counts.values())

    def sets_of(self, host: int) -> tuple[ParitySet, ...]:
        """The sets whose parity has pieces of a host."""
        return self._sets_by_host.get(host, ())

    @cached_property
    def _sets_by_host(self) -> dict[int, tuple[ParitySet, ...]]:
        result: dict[int, tuple[ParitySet, ...]] = {}
        for one in self.sets:
            for host in one.data:
                result[host] = (*result.get(host, ()), one)
        return result

    def holders_of(self, host: int) -> tuple[int, ...]:
        """The hosts that hold all that a host records: other ones, or with parity itself."""
        if not self.parsed.is_copies:
            return (host,)
        order = self.order
        at = order.index(host)
        return tuple(order[(at + number) % len(order)] for number in range(1, self.parsed.spares + 1))

    def parities_of(self, host: int) -> tuple[int, ...]:
        """The hosts that hold parities with pieces of a host, those that follow it in its group first; none of copies.

        The first M of them hold copies of what is small, too.
        """
        own = {one for among in self.sets_of(host) for one in among.parities}
        return tuple(sorted(own, key=lambda one: (one < host, one)))

    def lane_of(self, rank: int, world: int) -> int:
        """The number of a rank on its host."""
        return rank % max(world // len(self.hosts), 1)

    def host_of(self, rank: int, world: int) -> int:
        """The host of a rank: hosts have equally many ranks, in order.

        Raises `InvalidArgumentError` if they cannot: then a rank's copies might lie on its own host.
        """
        if world > len(self.hosts) and world % len(self.hosts):
            raise InvalidArgumentError(
                f"{world} ranks cannot be equally many on {len(self.hosts)} hosts",
                where="peers.hosts",
                hint="Name one holder for each host of the run.",
            )
        connections = max(world // len(self.hosts), 1) * self._senders
        if connections > MAX_CONNECTIONS:
            raise InvalidArgumentError(
                f"{self.scheme} needs {connections} connections to each holder, which lets in {MAX_CONNECTIONS}",
                where="peers.scheme",
                hint="Give a scheme of fewer hosts.",
            )
        return rank * len(self.hosts) // world


def changed_states(step: int, states: Mapping[str, str], logged: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each holder whose state is not the `logged` one, and whether it holds all; note it there."""
    for address, state in states.items():
        if logged.get(address) != state:
            logged[address] = state
            yield f"step {step}: the holder {address}: {state}", state == HELD
