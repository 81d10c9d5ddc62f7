"""Which hosts hold in memory what a host records."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.parity.scheme import PeerScheme, circle
from ckpt_formats.stores.address import NetworkAddress, parse_address

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
    """`copies:N`: N other hosts hold all that a host records. Any N - 1 hosts may be lost, and the chain besides."""
    jump: int = 1
    """The distance between a host and those that hold its copies: the hosts of a rack, so that no rack has all."""
    run: str | None = None
    """The name of the run, if hosts hold several; None: the name of the chain's folder."""

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str) or not all(isinstance(host, str) for host in self.hosts):
            raise InvalidArgumentError("`hosts` is not a list of addresses", where="peers.hosts")
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if len(set(self.addresses)) < len(self.hosts):
            raise InvalidArgumentError("a host is named twice", where="peers.hosts")
        if not PeerScheme.parse(self.scheme).is_copies:
            raise InvalidArgumentError(
                f"{self.scheme!r:.40} cannot be `peers.scheme`", where="peers.scheme", hint='Give "copies:2".'
            )
        if not isinstance(self.jump, int) or self.jump < 1:
            raise InvalidArgumentError(f"{self.jump!r:.40} cannot be `peers.jump`", where="peers.jump")
        if self.copies >= len(self.hosts):
            raise InvalidArgumentError(
                f"{self.scheme} needs more than {self.copies} hosts, and there are {len(self.hosts)}",
                where="peers.scheme",
                hint="Name more hosts, or fewer copies.",
            )

    # A sender asks for all holders of all ranks, again and again.

    @cached_property
    def copies(self) -> int:
        """How many other hosts hold what a host records."""
        return PeerScheme.parse(self.scheme).spares

    @cached_property
    def addresses(self) -> tuple[NetworkAddress, ...]:
        """The addresses of the holders, in the order of the hosts."""
        return tuple(map(parse_address, self.hosts))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The hosts in the order in which each gives its copies to those that follow it, in a circle."""
        return circle(len(self.hosts), self.jump)

    def holders_of(self, host: int) -> tuple[int, ...]:
        """The hosts that hold what a host records. It is not among them."""
        order = self.order
        at = order.index(host)
        return tuple(order[(at + number) % len(order)] for number in range(1, self.copies + 1))

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
        return rank * len(self.hosts) // world
