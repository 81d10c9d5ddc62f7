"""Schemes of peers' memory: what a text states, and what cannot be stated."""

import pytest

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.parity.scheme import PeerScheme


@pytest.mark.parametrize(
    ("text", "hosts", "losses", "memory", "sent"),
    [
        ("copies:2", 2, 1, 2.0, 1),
        ("copies:3", 3, 2, 3.0, 2),
        ("parity:8+2", 10, 2, 1.25, 2),
        ("parity:4+1", 5, 1, 1.25, 1),
    ],
)
def test_a_scheme_states_hosts_losses_memory_and_bytes(
    text: str, hosts: int, losses: int, memory: float, sent: int
) -> None:
    scheme = PeerScheme.parse(text)
    assert (scheme.hosts, scheme.spares, scheme.memory, scheme.sent) == (hosts, losses, memory, sent)
    assert str(scheme) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "copies",
        "copies:1",
        "copies:33",
        "copies:2 ",
        "parity:1+1",
        "parity:8+0",
        "parity:8+33",
        "parity:250+6",
        "raid:5",
    ],
)
def test_a_scheme_is_refused_with_what_it_may_be(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"parity:K\+M"):
        PeerScheme.parse(text)


def test_neighbours_of_one_rack_are_in_different_groups_if_jump_is_as_large() -> None:
    scheme = PeerScheme.parse("parity:8+2")
    assert [scheme.lost_together(8, jump) for jump in (1, 4, 8, 16)] == [8, 2, 1, 1]
    assert scheme.lost_together(100, 1) == 10
