"""Collective operations over the ranks of a run; without a process group there is one rank."""

from typing import TypeVar

from torch import distributed

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """The rank of this process, and the number of ranks."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


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
