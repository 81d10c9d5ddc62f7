"""What it costs to replay the deltas of a chain, and to write a state: estimated from bytes, so always the same.

Measured with `benchmarks/appending.py`: CPU time for each byte of values. It differs between machines and codecs, but
the quotient of the two, which decides, differs less.
"""

from collections.abc import Sequence

from ckpt_formats.universal.chain.chain_file import Member

REPLAY_NS = 0.31
"""Nanoseconds for each byte of the values of a delta that is replayed."""
WRITE_NS = 1.7
"""Nanoseconds for each byte of the values of a state that is written without a parent."""
_MAX_RATIO = 4
"""Replaying may take so many times as long as writing a state."""


def needs_base(deltas: Sequence[Member], raw_nbytes: int) -> bool:
    """Whether the next state, of `raw_nbytes`, is better a base: estimated from the deltas since the last one."""
    replayed = sum(member.raw_nbytes for member in deltas) + raw_nbytes
    return replayed * REPLAY_NS > _MAX_RATIO * raw_nbytes * WRITE_NS
