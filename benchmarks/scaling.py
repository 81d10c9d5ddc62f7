"""How codecs scale with threads: `python benchmarks/scaling.py [STATE] --threads 2 --rounds 9`.

Threads take chunks of a state in turn, as the workers of `ckpt compress` do, and like these they outlive a round: each
has done a chunk, in memory that it uses again, before the clock runs. Times are by the clock, less what each
thread waited for a core, as Linux counts it, since that is the doing of other programs; what threads wait for one
another stays in. Figures are medians.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from methods import Method, Piece, coded, ours, states_of
from states import default_folder, state_path

REPEATED = 8
"""So often is a state done in a round: starting threads shall take no time to speak of."""


def share(threads: int, function: Callable[[Any], Any], items: Iterable[Any], first: Any = None) -> float:
    """Have threads do all items, each taking the next: the longest that one was at it, less its waits for a core.

    `first` is what each does before the clock runs.
    """
    if first is not None and threads == 1:
        function(first)
    if threads == 1:
        return _work(function, items)
    left, lock, took = iter(items), threading.Lock(), list[float]()
    ready = threading.Barrier(threads)

    def taken() -> Iterable[Any]:
        end = object()
        while True:
            with lock:
                item = next(left, end)
            if item is end:
                return
            yield item

    def work() -> None:
        if first is not None:
            function(first)
        ready.wait()
        took.append(_work(function, taken()))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(took)


def _work(function: Callable[[Any], Any], items: Iterable[Any]) -> float:
    waited, began = _waited(), time.perf_counter()
    for item in items:
        function(item)
    return time.perf_counter() - began - (_waited() - waited)


def _waited() -> float:
    """Seconds that this thread was ready and had no core."""
    statistics = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(statistics.read_text().split()[1]) / 1e9 if statistics.exists() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, nargs="?", default=state_path(default_folder()))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    held, method = states_of(given.state), ours("default")
    sums = [0.0] * 4
    print("| state | encode MB/s | times | decode MB/s | times |\n| --- | --- | --- | --- | --- |")
    for state in held:
        work = coded(method, state, held) * REPEATED
        nbytes = sum(piece.values.nbytes for piece, _ in work)
        largest = max(work, key=lambda pair: pair[0].values.nbytes)
        shares: list[list[float]] = [[], [], [], []]
        for _ in range(given.rounds):
            for i, threads in enumerate((1, given.threads)):
                shares[i].append(share(threads, partial(_encode, method, state), work, largest))
                shares[2 + i].append(share(threads, partial(_decode, method, state), work, largest))
        middle = [median(times) for times in shares]
        sums = [a + b for a, b in zip(sums, middle, strict=True)]
        _show(state, nbytes, middle)
    _show("all", REPEATED * sum(array.nbytes for arrays in held.values() for array in arrays), sums)
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def _encode(method: Method, state: str, pair: tuple[Piece, Any]) -> None:
    method.encode(state, pair[0])


def _decode(method: Method, state: str, pair: tuple[Piece, Any]) -> None:
    method.decode(state, pair[1], pair[0])


def _show(state: str, nbytes: int, seconds: list[float]) -> None:
    """Speeds on many threads, and how many times those of one these are."""
    cells = [f"{nbytes / seconds[1 + i] / 1e6:,.0f} | {seconds[i] / seconds[1 + i]:.2f}" for i in (0, 2)]
    print(f"| {state} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
