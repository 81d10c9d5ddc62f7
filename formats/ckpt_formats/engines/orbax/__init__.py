"""Orbax, which saves the trees of JAX: Flax, optax, MaxText, EasyDeL, tunix.

folder     which folders are a checkpoint: a tree, a step, a run
metadata   its JSON files
indexed    the index of a checkpoint of EasyDeL
arrays     arrays as lazy tensors: OCDBT, or folders of zarr
tree       the model and the states of optax in a tree
read       the index of a checkpoint
plan       the leaves of the tree to write, and the data file of each chunk
write      data files, the database, the metadata
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_formats.core.arguments import Positive
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.transfer import Transfer

if TYPE_CHECKING:
    from ckpt_formats.containers.zarr_write import ChunkGrid


@dataclass(frozen=True, kw_only=True)
class Orbax(WritableFormat):
    """Orbax: trees of JAX with states of optax, for any mesh."""

    name = "orbax"
    summary = "Orbax: trees of JAX with states of optax, for any mesh"
    is_of_engine = True

    chunk_nbytes: Positive = 1 << 26
    """The most bytes of a chunk, which a reader that needs one element of it reads whole; an element may have more."""
    file_nbytes: Positive = 1 << 28
    """The most bytes of a data file, if it has more than one chunk: threads and workers write different files."""
    parts_per_axis: Positive = 1
    """Into how many parts each axis is cut that has a multiple of them, so that as many devices read only their own."""
    zarr3: bool = False
    """Whether arrays are of zarr 3, which programs with `use_zarr3=True` expect; else of zarr 2."""

    @property
    def _grid(self) -> "ChunkGrid":
        from ckpt_formats.containers.zarr_write import ChunkGrid

        return ChunkGrid(self.chunk_nbytes, self.parts_per_axis, self.zarr3)

    def detect(self, path: Path) -> bool:
        from ckpt_formats.engines.orbax.folder import is_checkpoint

        return is_checkpoint(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.orbax.read import read

        return read(path, options)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.engines.orbax.plan import plan_files

        return plan_files(source, self._grid, self.file_nbytes)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.engines.orbax.write import write_part

        return write_part(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        from ckpt_formats.engines.orbax.write import write_metadata

        write_metadata(folder, source, receipts, self._grid)
