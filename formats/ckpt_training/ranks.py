"""Collective operations over the ranks of a run; without a process group there is one rank."""

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import distributed

from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_training import routing
from ckpt_training.routing import Ranges

T = TypeVar("T")
_WARN_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_KEY = "ckpt_training/rank-{}"
_MAX_TEXT = 4000


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


def gather_bytes(data: bytes) -> list[bytes]:
    """The bytes of all ranks, in rank order. Every rank must call it. No pickle is sent."""
    _, world = rank_and_world()
    if world == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64, device=exchange_device()) for _ in range(world)]
    distributed.all_gather(sizes, torch.tensor([len(data)], device=exchange_device()))
    longest = max(int(size) for size in sizes)
    if longest == 0:
        return [b""] * world
    padded = _tensor(data.ljust(longest, b"\0"))
    every = [torch.empty_like(padded) for _ in range(world)]
    distributed.all_gather(every, padded)
    return [_bytes(one, int(size)) for one, size in zip(every, sizes, strict=True)]


def parent_of(rank: int) -> int | None:
    """Return the rank to which a rank sends what it has joined; None for rank 0. No rank has more than 14 children of
    16,384, and no path to rank 0 is longer."""
    return rank & (rank - 1) if rank else None


def children_of(rank: int, world: int) -> list[int]:
    """Return the ranks that send to a rank, ascending: each for all ranks from itself to before the next one."""
    most = rank & -rank or world
    return [rank + (1 << n) for n in range(world.bit_length()) if 1 << n < most and rank + (1 << n) < world]


def send_bytes(data: bytes, rank: int) -> None:
    """Send bytes to a rank that receives them (`received_bytes`). No pickle is sent."""
    distributed.send(torch.tensor([len(data)], device=exchange_device()), rank)
    if data:
        distributed.send(_tensor(data), rank)


def received_bytes(rank: int) -> bytes:
    """The bytes that a rank sends to this one."""
    size = torch.zeros(1, dtype=torch.int64, device=exchange_device())
    distributed.recv(size, rank)
    content = torch.empty(int(size), dtype=torch.uint8, device=exchange_device())
    if int(size):
        distributed.recv(content, rank)
    return _bytes(content, int(size))


def swap_bytes(distance: int, data: bytes) -> bytes:
    """Send bytes to the rank at a distance, and return those of the rank at this distance before this one.

    Every rank must call it. No pickle is sent.
    """
    rank, world = rank_and_world()
    target, source = (rank + distance) % world, (rank - distance) % world
    size = torch.zeros(1, dtype=torch.int64, device=exchange_device())
    _swap(torch.tensor([len(data)], device=exchange_device()), target, size, source)
    content = torch.empty(int(size), dtype=torch.uint8, device=exchange_device())
    _swap(_tensor(data) if data else None, target, content if int(size) else None, source)
    return _bytes(content, int(size))


def route(texts: Iterable[tuple[str, Ranges]]) -> dict[str, Ranges]:
    """The texts that ranks have sent to this one, each with these ranks. Every rank must call it.

    `texts`: what this rank sends, each with the ranks that get it.
    """
    return routing.route(texts, *rank_and_world(), swap_bytes)


def _swap(sent: torch.Tensor | None, target: int, received: torch.Tensor | None, source: int) -> None:
    operations = [] if sent is None else [distributed.P2POp(distributed.isend, sent, target)]
    operations += [] if received is None else [distributed.P2POp(distributed.irecv, received, source)]
    for one in distributed.batch_isend_irecv(operations) if operations else ():
        one.wait()


def merged(own: T, join: Callable[[list[T]], T]) -> T:
    """The plain values of all ranks, joined in the order of the ranks. Every rank must call it.

    A rank joins its value and those of its children. `join` gets values of ranks next to each other, and must not fail.
    """
    rank, world = rank_and_world()
    if world == 1:
        return join([own])
    values = [own, *(json.loads(zlib.decompress(received_bytes(child))) for child in children_of(rank, world))]
    data = zlib.compress(json.dumps(join(values)).encode(), 1)
    if (parent := parent_of(rank)) is not None:
        send_bytes(data, parent)
    every: T = json.loads(zlib.decompress(broadcast_bytes(data)))
    return every


def union(names: Iterable[str]) -> list[str]:
    """The names of all ranks, each once, in the order of the ranks. Every rank must call it."""
    own = list(dict.fromkeys(names))
    if not total([len(own)])[0]:
        return own
    return merged(own, lambda lists: list(dict.fromkeys(chain.from_iterable(lists))))


def broadcast_bytes(data: bytes, root: int = 0) -> bytes:
    """The bytes of one rank. Every rank must call it. No pickle is sent."""
    if rank_and_world()[1] == 1:
        return data
    size = torch.tensor([len(data)], device=exchange_device())
    distributed.broadcast(size, root)
    if not int(size):
        return b""
    content = (
        _tensor(data)
        if rank_and_world()[0] == root
        else torch.empty(int(size), dtype=torch.uint8).to(exchange_device())
    )
    distributed.broadcast(content, root)
    return _bytes(content, int(size))


def lowest(number: int) -> int:
    """The lowest of the numbers of all ranks. Every rank must call it."""
    if rank_and_world()[1] == 1:
        return number
    value = torch.tensor([number], dtype=torch.int64, device=exchange_device())
    distributed.all_reduce(value, distributed.ReduceOp.MIN)
    return int(value)


def total(numbers: Sequence[int]) -> list[int]:
    """The sums over all ranks of numbers, equally many on each. Every rank must call it."""
    if rank_and_world()[1] == 1 or not numbers:
        return list(numbers)
    values = torch.tensor(numbers, dtype=torch.int64, device=exchange_device())
    distributed.all_reduce(values)
    return [int(value) for value in values.tolist()]


def raise_together(error: BaseException | None) -> None:
    """Raise on all ranks if one rank has an error: the error of the first such rank. Every rank must call it.

    Other ranks raise a `CkptError` of the same kind, which names that rank.
    """
    rank, world = rank_and_world()
    root = lowest(world if error is None else rank)
    if root == world:
        return
    if world == 1:
        assert error is not None
        raise error
    own = json.dumps(_as_json(error, root)).encode() if rank == root else b""
    raise error_of(json.loads(broadcast_bytes(own, root))) from error


def error_of(facts: Mapping[str, Any]) -> CkptError:
    """The error of another process: `kind`, `what`, `where` and `hint`."""
    kind = next((one for one in _kinds(CkptError) if one.__name__ == facts["kind"]), UnsupportedError)
    return kind(facts["what"], where=facts["where"], hint=facts["hint"])


@contextmanager
def together() -> Iterator[None]:
    """Within, an error of one rank is raised on all ranks (`raise_together`). Every rank must enter it."""
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_together(failure)


def _as_json(error: BaseException | None, rank: int) -> dict[str, Any]:
    is_own = isinstance(error, CkptError)
    what = error.what if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return {
        "kind": type(error).__name__,
        "what": f"rank {rank}: {what}"[:_MAX_TEXT],
        "where": error.where if is_own else None,  # type: ignore[union-attr]
        "hint": error.hint if is_own else None,  # type: ignore[union-attr]
    }


def _kinds(kind: type[CkptError]) -> Iterator[type[CkptError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


def exchange_device() -> torch.device:
    """Return the device whose tensors the process group can send."""
    is_nccl = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(exchange_device())


def _bytes(tensor: torch.Tensor, size: int) -> bytes:
    return tensor[:size].cpu().numpy().tobytes()
