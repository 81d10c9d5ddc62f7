"""Schemes of memory that hosts lend each other: copies of what a host has, or parity of what several hosts have.

A scheme is written `copies:N` or `parity:K+M`. What a host has of a state is its piece.

- `copies:N`: the N hosts that follow a host, in a circle, hold its piece. Any N hosts may be lost. Gemini (SOSP 2023)
  has N = 1, and groups instead of a circle.
- `parity:K+M`: K + M hosts form a group, hold their own pieces, and M parities of each K pieces. Any M hosts of each
  group may be lost.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.text import printable
from ckpt_formats.parity.code import MAX_BLOCKS, MAX_LOST

FORMS = "copies:N, such as copies:2, or parity:K+M, such as parity:8+2"
MAX_COPIES = 32
_COPIES = re.compile(r"copies:(\d{1,3})", re.ASCII)
_PARITY = re.compile(r"parity:(\d{1,3})\+(\d{1,3})", re.ASCII)


@dataclass(frozen=True)
class ParitySet:
    """K hosts of a group, of whose pieces parities are computed, and the M other hosts that hold these parities.

    Each host of a group is a column of K sets, and holds a parity of M others. So it holds M / K of what it has itself,
    and a host that is lost takes at most one block of each set with it.
    """

    group: int
    number: int
    """Its place in the group."""
    data: tuple[int, ...]
    """The host of each column."""
    parities: tuple[int, ...]
    """The host of each parity."""


@dataclass(frozen=True)
class PeerScheme:
    """How many pieces a parity is computed of, and how many hosts may be lost. Copies are the code of one piece."""

    data: int
    """Pieces from which a parity is computed; 1 for copies."""
    spares: int
    """Parities of so many pieces, or hosts with a copy: so many hosts may be lost at once."""

    @classmethod
    def parse(cls, text: str) -> "PeerScheme":
        """The scheme that a text states. Raises `InvalidArgumentError`."""
        if (match := _COPIES.fullmatch(text)) and 1 <= int(match[1]) <= MAX_COPIES:
            return cls(1, int(match[1]))
        if match := _PARITY.fullmatch(text):
            data, spares = int(match[1]), int(match[2])
            if data >= 2 and 1 <= spares <= MAX_LOST and data + spares <= MAX_BLOCKS:
                return cls(data, spares)
        hint = (
            f"N is from 1 to {MAX_COPIES}; K at least 2, M from 1 to {MAX_LOST}, and both together at most "
            f"{MAX_BLOCKS}."
        )
        raise InvalidArgumentError(f"`{printable(text[:60])}` is not {FORMS}", where="scheme", hint=hint)

    def __str__(self) -> str:
        return f"copies:{self.spares}" if self.is_copies else f"parity:{self.data}+{self.spares}"

    @property
    def is_copies(self) -> bool:
        return self.data == 1

    @property
    def hosts(self) -> int:
        """The hosts of a group; the fewest that copies need."""
        return self.data + self.spares

    @property
    def memory(self) -> float:
        """What a host holds of one state, in multiples of a piece.

        With parity, it holds its own piece, too, because lost ones are computed from those of others.
        """
        return float(self.spares) if self.is_copies else 1 + self.spares / self.data

    @property
    def sent(self) -> int:
        """What a host sends of each state, in multiples of a piece: every piece goes to each of its spares."""
        return self.spares

    def groups(self, hosts: int, jump: int = 1) -> tuple[range, ...]:
        """The hosts of each group of parity, by their places in the list of hosts. Each host is in one group.

        Hosts of a group are at least `jump` apart, so that neighbours that fail together are in different groups.
        If the groups do not come out even, some have more hosts. Raises `InvalidArgumentError` for too few hosts.
        """
        runs = hosts // (jump * self.hosts)
        if not runs:
            raise InvalidArgumentError(
                f"{self} with jump={jump} needs {jump * self.hosts} hosts, and there are {hosts}",
                where="scheme",
                hint="Give a smaller jump, or a scheme of fewer hosts.",
            )
        result: list[range] = []
        for run in range(runs):
            low, high = run * hosts // runs, (run + 1) * hosts // runs
            count = (high - low) // self.hosts
            result += [range(low + group, high, count) for group in range(count)]
        return tuple(result)

    def sets(self, hosts: int, jump: int = 1) -> Iterator[ParitySet]:
        """All sets of all groups. Raises `InvalidArgumentError` as `groups`."""
        for group, members in enumerate(self.groups(hosts, jump)):
            for number in range(len(members)):
                own = [members[(number + at) % len(members)] for at in range(self.hosts)]
                yield ParitySet(group, number, tuple(own[self.spares :]), tuple(own[: self.spares]))

    def holding(self, hosts: int, jump: int) -> Iterator[Sequence[int]]:
        """The hosts that have the same, or its parity: of each set, so many as there are spares may be lost."""
        if not self.is_copies:
            yield from self.groups(hosts, jump)
            return
        order = circle(hosts, jump)
        for at in range(hosts):
            yield [order[(at + number) % hosts] for number in range(self.hosts)]

    def neighbours(self, hosts: int, jump: int) -> int:
        """How many neighbours in the list of hosts may be lost, wherever they begin."""
        if not self.is_copies:
            return self.spares * jump
        # The circle goes on from the last hosts of the list to the first ones, which may be nearer than `jump`.
        return min(max(own) - min(own) for own in self.holding(hosts, jump))

    def covers(self, rack: int, hosts: int, jump: int) -> bool:
        """Whether the hosts of any rack may be lost: so many in a row, the first rack from the first host on."""
        return all(
            max(Counter(host // rack for host in own).values()) <= self.spares for own in self.holding(hosts, jump)
        )

    def lost_together(self, neighbours: int, jump: int) -> int:
        """How many hosts that hold parts of one piece, or its parity, are among so many neighbours, at most.

        They are at least `jump` apart: those of a group, and those that follow each other in the circle of copies
        of many hosts (`neighbours` is exact).
        """
        return -(-neighbours // jump)


def circle(hosts: int, jump: int) -> tuple[int, ...]:
    """The hosts in the order in which each gives its copies to those that follow it; after the last comes the first."""
    return tuple(sorted(range(hosts), key=lambda host: (host % jump, host)))
