"""DeepSpeed: ZeRO stages 0 to 3, with data, tensor, pipeline and expert parallelism.

folder        lists the files by rank; `step` opens them, `lookups` reads their fields
weights       the model, layer and expert files of one model-parallel rank -> tensors by name
experts, pipeline   the numbers of experts; which layer is in which stage
zero12, zero3, stage0   the optimizer of one model-parallel rank -> states by name, with
              `flat_partitions` and `optimizer_states`
rank          both of one rank; `merge`: all ranks -> full parameters, by the rules of `core.layout`
agreement     checks that the files are of one step
extras        everything that is not a tensor of the model
read          all of these -> a checkpoint, after a check that the files are of one run
options       of the format
write_layout  the layout to write; `write_parts`: its files, with `write_model` and `write_optimizer`
universal     DeepSpeed's universal checkpoint, a format of its own
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.deepspeed.folder import has_latest, is_step
from ckpt_formats.engines.deepspeed.options import LayoutOptions

_OWN = re.compile(r"latest.*|global_step\d+")
"""Names in the folder of a run that only the engine's own files may have."""
_OF_RANKS = "items that only these ranks of the source have, such as RNG states"


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(LayoutOptions, WritableFormat):
    """DeepSpeed's ZeRO stages 0 to 3, with tensor and pipeline parallelism."""

    name = "deepspeed"
    summary = "DeepSpeed ZeRO stages 0 to 3, with tensor, pipeline and expert parallelism"
    is_of_engine = True
    even_states = True

    def detect(self, path: Path) -> bool:
        return is_step(path) or has_latest(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.deepspeed.read import read_folder

        return read_folder(path, options)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.engines.deepspeed.step import rank_name
        from ckpt_formats.engines.deepspeed.write_layout import resolve_layout
        from ckpt_formats.engines.deepspeed.write_parts import parts
        from ckpt_formats.state_dicts.run_files import plan_run_files

        run_files, source = plan_run_files(source, _OWN)
        files = tuple(parts(resolve_layout(source, self)))
        names = {rank_name(Path(file.file)) for file in files}
        ranks = source.extras.get("ranks")
        dropped = sorted(name for name in (ranks if isinstance(ranks, dict) else ()) if name not in names)
        return Plan((*files, *run_files), (Notice(_OF_RANKS, tuple(dropped)),) if dropped else ())

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.containers.torchfile_tree import write_tree
        from ckpt_formats.state_dicts.run_files import SideFile, write_side_file

        if isinstance(part.content, SideFile):
            return write_side_file(folder, part, transfer)
        (folder / part.file).parent.mkdir(exist_ok=True)
        return write_tree(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        draft = folder / "latest.tmp"
        draft.write_text(Path(receipts[0].file).parent.name)
        os.replace(draft, folder / "latest")
