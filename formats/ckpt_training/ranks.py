"""Collective operations over the ranks of a run; without a process group there is one rank."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from ckpt_formats.core.errors import UnsupportedError

T = TypeVar("T")
_WARN_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_KEY = "ckpt_training/rank-{}"


def rank_and_world() -> tuple[int, int]:
    """The rank of this process, and the number of ranks."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def await_all(seconds: float, warn: Callable[[str], None]) -> None:
    """Wait until every rank has called this as often as this rank. `warn` gets a text after half a minute.

    Raises `UnsupportedError` after `seconds`: without it, a rank that is alone would wait in its first collective
    operation for as long as the process group allows.
    """
    rank, world = rank_and_world()
    store = distributed.distributed_c10d._get_default_store() if world > 1 else None
    if store is not None:
        await_ranks(store, rank, world, seconds, warn)


def await_ranks(store: Any, rank: int, world: int, seconds: float, warn: Callable[[str], None]) -> None:
    """`await_all` in a store of torch, for `rank` of `world` ranks."""
    calls, begin, warned = store.add(_KEY.format(rank), 1), time.monotonic(), False
    while late := [one for one in range(world) if store.add(_KEY.format(one), 0) < calls]:
        waited = time.monotonic() - begin
        names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}{', …' * (len(late) > 8)}"
        if waited > seconds:
            store.add(_KEY.format(rank), -1)  # a rank that comes now waits in turn
            raise UnsupportedError(
                f"{names} of {world} constructed no Recorder within {seconds:g} s: all ranks must do so together",
                hint="Construct the Recorder on every rank: each records its share.",
            )
        if waited > _WARN_SECONDS and not warned:
            warned = True
            warn(f"rank {rank} waits for {names} to construct a Recorder, at most {seconds:g} s")
        time.sleep(min(_PAUSE_SECONDS * (1 + waited), 1.0))


def gather(value: T) -> list[T]:
    """The values of all ranks, in rank order. Every rank must call it."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    values: list[T] = [value] * world
    distributed.all_gather_object(values, value)
    return values


def broadcast(value: T) -> T:
    """The value of rank 0. Every rank must call it."""
    values = [value]
    if rank_and_world()[1] > 1:
        distributed.broadcast_object_list(values, src=0)
    return values[0]
