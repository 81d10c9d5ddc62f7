"""The process beside a rank that makes bases: it writes the pieces in the ring to a file, and rank 0's folds them.

`python -m ckpt_recorder.base_process RING STATUS TRAINER` starts it, with two descriptors and a process id, as
`ckpt_recorder.writer`. It has a low priority. It reads the settings and then orders from its standard input: for each
base `BeginBase`, a `WritePiece` for each piece, and `FinishBase`.

It sends lines to the trainer: `ready`, `free` for each slot that may be used again, `broken REASON`, and after each
base `stored STEP` or `failed REASON`. If the trainer is killed, a base whose pieces are complete is still folded, and
any other one is dropped. It does not need torch, unless torch's own optimizer must replay the steps.
"""

import os
import shutil
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ckpt.pipeline import Execution
from ckpt_codecs.base import Array
from ckpt_formats.core.errors import CkptError
from ckpt_formats.universal.gradients.layout import RankLayout
from ckpt_formats.universal.gradients.segment import open_layout
from ckpt_recorder.base_folding import fold
from ckpt_recorder.base_pieces import BaseSettings, PiecesFile, folder_name
from ckpt_recorder.orders import BASE_ORDERS, BaseOrder, BeginBase, FinishBase, WritePiece
from ckpt_training.writing.ring import Ring
from ckpt_training.writing.trainer_messages import OrderWriter, execute_orders, reason_of

_ORPHAN_SECONDS = 10.0
"""How long to wait for the pieces of other ranks after the trainer has ended."""
_NICE = 10
"""Added to the priority of the trainer. With 19, a process makes no progress where all cores are busy."""
_RESOURCES = Execution(workers=1, memory=64 << 20)


def piece_values(
    memory: Array, layout: RankLayout, chunks: Sequence[int], names: Sequence[str]
) -> dict[str, list[Array]]:
    """The values of a piece in a slot: for each state its chunks, each (n,) float32, views of `memory`.

    `memory`: the bytes of the slot. It has all chunks of the first state, then all of the second, and so on.
    """
    sizes = [high - low for low, high in map(layout.chunk_bounds, chunks)]
    ends = list(accumulate(sizes * len(names), initial=0))
    values = memory[: ends[-1] * 4].view(np.float32)
    parts = [values[low:high] for low, high in pairwise(ends)]
    return {name: parts[at * len(chunks) : (at + 1) * len(chunks)] for at, name in enumerate(names)}


class BaseWriter(OrderWriter):
    """Executes orders. After a failure it only frees slots, until the next base begins."""

    def __init__(self, settings: BaseSettings, ring: Ring, status: int, trainer: int) -> None:
        """`status`: the descriptor for messages. `trainer`: the id of its process."""
        self._trainer = trainer
        self._settings, self._ring, self._status = settings, ring, status
        self._run = Path(settings.chain)
        self._layout, self._heads = open_layout(self._run / settings.segment)
        self._folder: Path | None = None
        self._file: PiecesFile | None = None
        self._failure: str | None = None
        os.nice(_NICE)  # after its start
        self._send("ready")

    def do(self, order: BaseOrder, data: bytes) -> None:
        """Execute an order."""
        try:
            if isinstance(order, BeginBase):
                self._begin(order.step)
            elif isinstance(order, FinishBase):
                self._finish(order.step)
            elif isinstance(order, WritePiece) and self._file is not None:
                layout = self._layout.ranks[self._settings.rank]
                values = piece_values(self._ring.slot(order.slot), layout, order.chunks, order.states)
                self._file.add(order.step, order.chunks, values)
        except Exception as error:
            self._failure = self._failure or (error.what if isinstance(error, CkptError) else reason_of(error))
            self._close_file()
        if isinstance(order, WritePiece):
            self._send("free")
        if isinstance(order, FinishBase):
            self._send(f"stored {order.step}" if self._failure is None else f"failed {self._failure}")

    def close(self) -> None:
        """Give up the base that is not complete, if there is one."""
        self._close_file()
        self._remove()

    def _begin(self, step: int) -> None:
        self.close()
        self._failure = None
        self._folder = self._run / folder_name(step, self._layout.run)
        self._file = PiecesFile(self._folder, self._heads[self._settings.rank])

    def _finish(self, step: int) -> None:
        if self._file is None or self._folder is None:
            return
        self._file.finish(step)
        if self._settings.rank:
            return  # rank 0 folds; the lock shows that the folder is in use
        try:
            fold(self._run, self._settings.segment, self._folder, step, self._seconds, _RESOURCES)
        finally:
            self.close()

    def _seconds(self) -> float:
        """How long to wait for the pieces of other ranks."""
        return self._settings.seconds if os.getppid() == self._trainer else _ORPHAN_SECONDS

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _remove(self) -> None:
        """Remove the folder. Only rank 0 does so, because the others cannot know whether it needs their pieces."""
        if self._folder is not None and not self._settings.rank:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def main() -> None:
    execute_orders(BaseSettings, BASE_ORDERS, BaseWriter)


if __name__ == "__main__":
    main()
