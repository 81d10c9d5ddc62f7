"""PyTorch Distributed Checkpoint: FSDP, HSDP, DDP, tensor parallelism; TorchTitan, Accelerate.

folder     which files are a checkpoint
metadata   .metadata: names, shapes, blocks, places
items      blocks as lazy blobs        (zstd: compressed ones)
objects    values that are no tensors
nesting    state dicts flattened, and nested again
read       the index of a checkpoint
cut        blocks of tensors over a mesh of ranks
entries    items to be written         (section: blocks cut out when they are read)
plan       which rank's file each goes into
write      the files, and the metadata
"""

from collections.abc import Sequence
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint, FilePlan, Goal, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.dcp.folder import is_checkpoint
from ckpt_formats.engines.dcp.plan import plan_parts
from ckpt_formats.engines.dcp.read import read
from ckpt_formats.engines.dcp.write import write_metadata, write_part
from ckpt_formats.state_dicts.write import added_options


class DCP(WritableFormat):
    name = "dcp"
    summary = "PyTorch Distributed Checkpoint, of any number of ranks"
    needs_model = False
    degrees = ("dp", "tp")

    def detect(self, path: Path) -> bool:
        return is_checkpoint(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        return read(path, options)

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[FilePlan, ...]:
        return plan_parts(source, goal)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return write_part(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        write_metadata(folder, receipts)

    def remarks(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str, ...]:
        added = ", ".join(added_options(source))
        return (
            (f"options that the source does not speak of are as torch.optim.AdamW has them: {added}",) if added else ()
        )
