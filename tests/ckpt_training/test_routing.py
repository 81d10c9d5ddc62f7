"""Texts reach the ranks that they are sent to, and no others; shares of many ranks are those that one computes."""

import random
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import pytest

from ckpt_formats.core.geometry import Box
from ckpt_training.routing import Ranges, ranks_in, route
from ckpt_training.shares import Piece, equal_shares, own_shares


def routed(sent: list[list[tuple[str, Ranges]]]) -> list[dict[str, Ranges]]:
    """What each rank gets, with a thread for each."""
    world = len(sent)
    results: list[dict[str, Ranges]] = [{} for _ in range(world)]

    def swap_of(rank: int) -> Callable[[int, bytes], bytes]:
        def swap(distance: int, data: bytes) -> bytes:
            channels[rank, (rank + distance) % world].put(data)
            return channels[(rank - distance) % world, rank].get(timeout=60)

        return swap

    def work(rank: int) -> None:
        results[rank] = route(sent[rank], rank, world, swap_of(rank))

    channels = {(a, b): SimpleQueue[bytes]() for a in range(world) for b in range(world)}
    threads = [Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 13])
def test_texts_reach_the_ranks_that_they_are_sent_to_with_all_senders(world: int) -> None:
    rng = random.Random(world)
    sent: list[list[tuple[str, Ranges]]] = []
    for _ in range(world):
        low = rng.randrange(world)
        some = ((low, rng.randrange(low, world) + 1),)
        one = rng.randrange(world)
        sent.append([("to all", ((0, world),)), (f"{some}", some), (f"one {one}", ((one, one + 1),))])
    expected: list[dict[str, set[int]]] = [{} for _ in range(world)]
    for rank, texts in enumerate(sent):
        for text, to in texts:
            for target in ranks_in(to):
                expected[target].setdefault(text, set()).add(rank)
    assert [{text: set(ranks_in(of)) for text, of in one.items()} for one in routed(sent)] == expected


def test_own_shares_are_those_of_equal_shares() -> None:
    rng = random.Random(0)
    pieces: list[tuple[Piece, Ranges]] = []
    for number in range(40):
        size = rng.randrange(1, 200)
        of: Ranges = rng.choice([((0, 5),), ((1, 2), (3, 4), (6, 9)), ((4, 5),)])
        pieces.append(((f"p{number}", Box((0,), (size,)), 0, size), of))

    def grain(piece: Piece) -> int:
        return 1 + piece[3] % 7

    every = list(equal_shares([(piece, tuple(ranks_in(of))) for piece, of in pieces], grain))
    for rank in range(9):
        own = [(number, piece) for number, piece in enumerate(pieces) if rank in ranks_in(piece[1])]
        shares = list(own_shares([piece for _, piece in own], rank, grain))
        assert shares == [every[number][rank] for number, _ in own]
