"""PyTorch Distributed Checkpoint: FSDP, HSDP, DDP, tensor parallelism; TorchTitan, Accelerate.

folder     which files are a checkpoint
metadata   `.metadata`: names, shapes, blocks, offsets
items      blocks as lazy blobs; some are compressed with zstd
objects    values that are no tensors
nesting    flattens state dicts, and nests them again
megatron_fsdp  the state dicts of Megatron-FSDP, as those of Megatron core's models, and back
read       the index of a checkpoint
balance    the blocks of tensors over a mesh of ranks, of about equal size
entries    items to write
options    of the format; plan: the file of each item
write      the files and the metadata
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import unsure
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.dcp.folder import is_checkpoint
from ckpt_formats.engines.dcp.options import RankOptions


@dataclass(frozen=True, kw_only=True)
class DCP(RankOptions, WritableFormat):
    """PyTorch Distributed Checkpoint, of any number of ranks."""

    name = "dcp"
    summary = "PyTorch Distributed Checkpoint, of any number of ranks"
    is_of_engine = True
    needs_model = False

    def detect(self, path: Path) -> bool:
        return is_checkpoint(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.dcp.read import read

        return read(path, options)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.engines.dcp.plan import plan_files
        from ckpt_formats.state_dicts.write import added_options

        added = ", ".join(added_options(source))
        text = f"options that the source does not state have the defaults of torch.optim.AdamW: {added}"
        return Plan(plan_files(source, self), notes=unsure((text,)) if added else ())

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.engines.dcp.write import write_part

        return write_part(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        from ckpt_formats.engines.dcp.write import write_metadata

        write_metadata(folder, receipts)
