"""A chain, read as its last state."""

from pathlib import Path

from ckpt_formats.base import Checkpoint, Format, Options
from ckpt_formats.chain import index, members


class ChainFormat(Format):
    name = "chain"
    summary = "a folder of checkpoints of one run, most of them deltas; read as its last step"

    def detect(self, path: Path) -> bool:
        return (path / index.NAME).is_file()

    def read(self, path: Path, options: Options) -> Checkpoint:
        return members.open_last(path, index.load(path / index.NAME))
