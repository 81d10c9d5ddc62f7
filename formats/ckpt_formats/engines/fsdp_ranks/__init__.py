"""Files of FSDP jobs in which each rank saved its own state with `torch.save`.

folder             lists the files by rank
lookups            typed look-ups in the objects of a pickle
mesh, placement    grids of ranks, and how they shard a tensor: arithmetic
dtensor            FSDP2, also with tensor parallelism
sharded_tensor     FSDP1
rank_file, leaves  one rank's file, and its tensors by kind
sections           a file that has model, optimizer and more
single_rank        one rank's file without the others
merge              trees of all ranks -> one tree of full tensors
flat_parameter     FSDP1's flattened parameters -> tensors of their true shapes
model, optimizer   state dicts of all ranks -> one
read               all of these, without the names of wrappers, and everything else -> a checkpoint
"""

from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import Format, ReadOptions


class FsdpRanks(Format):
    name = "fsdp-ranks"
    summary = "FSDP, one file of torch.save for each rank: DTensors, ShardedTensors"
    is_of_engine = True

    def detect(self, path: Path) -> bool:
        from ckpt_formats.engines.fsdp_ranks.folder import has_script_names, is_rank_file

        try:
            if path.is_file():
                return is_rank_file(path.name)
            names = [entry.name for entry in path.iterdir()]
            return any(map(is_rank_file, names)) or has_script_names(names)
        except OSError:
            return False

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.fsdp_ranks.read import read_folder

        return read_folder(path, options)
