"""Schemes of peers' memory: what a text states, and what cannot be stated."""

import itertools

import pytest

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.parity.scheme import PeerScheme


@pytest.mark.parametrize(
    ("text", "hosts", "losses", "memory", "sent"),
    [
        ("copies:1", 2, 1, 1.0, 1),
        ("copies:2", 3, 2, 2.0, 2),
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
        "copies:0",
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


@pytest.mark.parametrize("text", ["parity:2+1", "parity:3+2", "parity:8+2"])
@pytest.mark.parametrize(("hosts", "jump"), [(280, 1), (280, 7), (283, 8), (30, 3), (31, 3)])
def test_each_host_is_in_one_group_and_no_neighbours_are_lost_together(text: str, hosts: int, jump: int) -> None:
    scheme = PeerScheme.parse(text)
    groups = scheme.groups(hosts, jump)
    assert sorted(host for group in groups for host in group) == list(range(hosts))
    assert min(map(len, groups)) >= scheme.hosts
    for size in (1, jump, jump + 1, 2 * jump + 1):
        windows = [range(first, first + size) for first in range(hosts - size)]
        worst = max(len(set(window) & set(group)) for window in windows for group in groups)
        assert worst <= scheme.lost_together(size, jump)
        assert size > jump or worst == 1


@pytest.mark.parametrize("text", ["copies:1", "copies:2", "copies:3", "parity:3+2"])
def test_neighbours_and_racks_are_those_that_may_be_lost(text: str) -> None:
    scheme = PeerScheme.parse(text)
    for hosts, jump in itertools.product(range(scheme.hosts, 21), range(1, 5)):
        if hosts < jump * scheme.hosts:
            continue
        order = sorted(range(hosts), key=lambda host: (host % jump, host))
        rows = [{order[(at + k) % hosts] for k in range(scheme.hosts)} for at in range(hosts)]
        sets = rows if scheme.is_copies else list(map(set, scheme.groups(hosts, jump)))

        def is_lost(first: int, size: int, sets: list[set[int]] = sets) -> bool:
            return any(len(one.intersection(range(first, first + size))) > scheme.spares for one in sets)

        size = scheme.neighbours(hosts, jump)
        assert size >= scheme.spares
        assert not any(is_lost(first, size) for first in range(hosts - size + 1))
        assert not scheme.is_copies or any(is_lost(first, size + 1) for first in range(hosts - size))
        for rack in range(1, 9):
            assert scheme.covers(rack, hosts, jump) != any(is_lost(first, rack) for first in range(0, hosts, rack))


def test_groups_need_as_many_hosts_as_scheme_and_jump_say() -> None:
    with pytest.raises(InvalidArgumentError, match="needs 80 hosts, and there are 79"):
        PeerScheme.parse("parity:8+2").groups(79, 8)
