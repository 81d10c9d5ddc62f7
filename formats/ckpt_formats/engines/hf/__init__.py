"""Folders of Hugging Face's libraries: models, and what its Trainer, Accelerate and PEFT save.

folder          lists the files by kind
weights         the files of weights, in safetensors or of torch; `model_names`: the names that transformers uses
components      models in several folders, such as diffusers' pipelines
config_check    checks that tensors have the shapes that the configuration states
side_files      configuration, tokenizer and other files next to the weights
trainer_files   files that a Trainer saves next to the checkpoint of another engine
read, write     a folder -> a checkpoint, and back
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.arguments import LocalPath, Positive, as_path
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, unsure
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.hf.folder import recognised


@dataclass(frozen=True, kw_only=True)
class HuggingFace(WritableFormat):
    """A folder as `save_pretrained` writes it: shards of weights, the configuration and the tokenizer."""

    name = "hf"
    summary = "a folder of transformers, its Trainer, Accelerate or PEFT: weights, configuration, training state"
    joins_ranks = False
    files_are_checkpoints = True
    naming = "hf"

    shard_nbytes: Positive = 5 << 30
    """Bytes: about how large each file of weights becomes."""
    config: LocalPath | None = None
    """The model's configuration, or its folder; None: the configuration of the source."""

    def detect(self, path: Path) -> bool:
        return recognised(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.hf.read import read_folder

        return read_folder(path, options)

    def input_files(self) -> tuple[Path, ...]:
        return () if self.config is None else (as_path(self.config),)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.containers.safetensors_shards import lost_states
        from ckpt_formats.engines.hf.write import plan_files
        from ckpt_formats.state_dicts.run_files import PREFIX

        files, remarks = plan_files(source, self.shard_nbytes, next(iter(self.input_files()), None))
        written = {f"{PREFIX}{file.file}" for file in files if not file.parameters}
        dropped = tuple(key for key in source.extras if key not in written)
        extras = (Notice("extras", dropped),) if dropped else ()
        return Plan(files, (*lost_states(source), *extras), unsure(remarks))

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.engines.hf.write import write_part

        return write_part(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        from ckpt_formats.containers.safetensors_shards import SAFETENSORS_INDEX, write_last
        from ckpt_formats.containers.shard_index import index_text

        files = [(receipt.file, receipt.entry) for receipt in receipts if receipt.entry]
        if len(files) > 1:
            stem = files[0][0].partition("-")[0]
            write_last(folder, f"{stem}{SAFETENSORS_INDEX}", index_text(files))
