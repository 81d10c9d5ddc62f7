"""Folders of Hugging Face's libraries: models, and what its Trainer, Accelerate and PEFT save of a run."""

from collections.abc import Sequence
from pathlib import Path

from ckpt_formats.containers.safetensors_shards import SAFETENSORS_INDEX, lost_states, write_last
from ckpt_formats.containers.shard_index import index_text
from ckpt_formats.core.checkpoint import Checkpoint, FilePlan, Goal, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.hf.folder import recognised
from ckpt_formats.engines.hf.read import read_folder
from ckpt_formats.engines.hf.side_files import PREFIX
from ckpt_formats.engines.hf.write import parts_of, write_part


class HuggingFace(WritableFormat):
    name = "hf"
    summary = "a folder of transformers, its Trainer, Accelerate or PEFT: weights, configuration, training state"

    def detect(self, path: Path) -> bool:
        return recognised(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        return read_folder(path, options)

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[FilePlan, ...]:
        return parts_of(source, goal)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return write_part(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        files = [(receipt.file, receipt.entry) for receipt in receipts if receipt.entry]
        if len(files) > 1:
            stem = files[0][0].partition("-")[0]
            write_last(folder, f"{stem}{SAFETENSORS_INDEX}", index_text(files))

    def losses(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str | Notice, ...]:
        written = {f"{PREFIX}{part.file}" for part in parts if not part.parameters}
        lost = [key for key in source.extras if key not in written]
        return (*lost_states(source), Notice("extras", tuple(lost))) if lost else lost_states(source)

    def remarks(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str, ...]:
        return tuple(remark for part in parts for remark in part.what.get("remarks", ()))
