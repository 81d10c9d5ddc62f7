"""DeepSpeed's universal checkpoint: a folder for each full parameter, and the model's files.

folder        lists the files
read          all files -> a checkpoint
master_check  checks that the masters round to the weights
write         a checkpoint -> all files
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import form_of
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.deepspeed.folder import step_of
from ckpt_formats.engines.deepspeed.universal.folder import LATEST, has_latest, is_universal, list_universal
from ckpt_formats.engines.deepspeed.universal.options import UniversalOptions


@dataclass(frozen=True, kw_only=True)
class DeepSpeedUniversal(UniversalOptions, WritableFormat):
    """DeepSpeed's universal checkpoint, which `load_universal` reads."""

    name = "deepspeed-universal"
    summary = "DeepSpeed's universal checkpoint, for load_universal at ZeRO stages 1 to 3"
    is_of_engine = True
    even_states = True

    def detect(self, path: Path) -> bool:
        return is_universal(path) or has_latest(path)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.deepspeed.universal.read import read_universal

        folder = list_universal(step_of(path, LATEST, is_universal))
        with form_of("a universal checkpoint", folder.path):
            return read_universal(path, folder, options)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.engines.deepspeed.universal.write import parts, resolve_universal

        files = tuple(parts(resolve_universal(source, self), self))
        return Plan(files, tuple(_dropped(source)))

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.containers.torchfile_tree import write_tree

        (folder / part.file).parent.mkdir(parents=True, exist_ok=True)
        return write_tree(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        from ckpt_formats.engines.deepspeed.universal.write import MODEL_FILE

        step = next(Path(r.file).parent.name for r in receipts if r.file.endswith(MODEL_FILE))
        draft = folder / f"{LATEST}.tmp"
        draft.write_text(step)
        os.replace(draft, folder / LATEST)


def _dropped(source: Checkpoint) -> Iterator[Notice]:
    """Notices of the items of the source that the format cannot hold."""
    ranks, config = source.extras.get("ranks"), source.extras.get("ds_config")
    if isinstance(ranks, dict) and ranks:
        yield Notice("items that only these ranks of the source have, such as RNG states", tuple(sorted(ranks)))
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        yield Notice("round_robin_gradients: disable it in the new run, else DeepSpeed loads values into wrong places")
