"""Schemes of memory that hosts lend each other: copies of a host's state, or parity of several hosts' states.

A scheme is written `copies:N` or `parity:K+M`. Hosts form groups; the state of a host is its piece, and its own memory
holds it in any case, because that is where a trainer that restarts on the same host reads it.

- `copies:N`: N hosts form a group, and each of them holds the pieces of all. N - 1 of them may be lost (Gemini, SOSP
  2023, has N = 2).
- `parity:K+M`: K + M hosts form a group. Each piece counts in M parities that other hosts of the group hold, each of
  K pieces; any M hosts may be lost.
"""

import re
from dataclasses import dataclass

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.text import printable
from ckpt_formats.parity.code import MAX_BLOCKS

FORMS = "copies:N, such as copies:2, or parity:K+M, such as parity:8+2"
MAX_COPIES = 32
MAX_PARITIES = 32
_COPIES = re.compile(r"copies:(\d{1,3})", re.ASCII)
_PARITY = re.compile(r"parity:(\d{1,3})\+(\d{1,3})", re.ASCII)


@dataclass(frozen=True)
class PeerScheme:
    """How many pieces a code has, and how many of them may be lost. Copies are the code of one piece."""

    data: int
    """Pieces from which a parity is computed; 1 for copies."""
    spares: int
    """Parities of so many pieces, or copies beside the own one: as many hosts of a group may be lost at once."""

    @classmethod
    def parse(cls, text: str) -> "PeerScheme":
        """The scheme that a text states. Raises `InvalidArgumentError`."""
        if (match := _COPIES.fullmatch(text)) and 2 <= int(match[1]) <= MAX_COPIES:
            return cls(1, int(match[1]) - 1)
        if match := _PARITY.fullmatch(text):
            data, spares = int(match[1]), int(match[2])
            if data >= 2 and 1 <= spares <= MAX_PARITIES and data + spares <= MAX_BLOCKS:
                return cls(data, spares)
        hint = (
            f"N is from 2 to {MAX_COPIES}, the own one included; K at least 2, M from 1 to {MAX_PARITIES}, and both "
            f"together at most {MAX_BLOCKS}."
        )
        raise InvalidArgumentError(f"`{printable(text[:60])}` is not {FORMS}", where="scheme", hint=hint)

    def __str__(self) -> str:
        return f"copies:{self.spares + 1}" if self.data == 1 else f"parity:{self.data}+{self.spares}"

    @property
    def hosts(self) -> int:
        """The hosts of a group."""
        return self.data + self.spares

    @property
    def memory(self) -> float:
        """What a host holds of one state, in multiples of its own piece, its own included."""
        return 1 + self.spares / self.data

    @property
    def sent(self) -> int:
        """What a host sends of each state, in multiples of its own piece: every piece goes to each of its spares."""
        return self.spares

    def groups(self, hosts: int, jump: int = 1) -> tuple[range, ...]:
        """The hosts of each group, by their places in the list of hosts. Each host is in one group.

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

    def lost_together(self, neighbours: int, jump: int) -> int:
        """How many hosts of one group are among so many neighbours, at most, in `groups` with this jump."""
        return -(-neighbours // jump)
