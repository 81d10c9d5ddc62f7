"""Models of llama.cpp: `.gguf` files. See docs/gguf.md.

read, write     a file -> a checkpoint, and back
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_formats.containers.gguf import MAGIC
from ckpt_formats.core.arguments import LocalPath, as_path
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.transfer import Transfer

SUFFIX = ".gguf"


@dataclass(frozen=True, kw_only=True)
class Gguf(WritableFormat):
    """A model in one `.gguf` file: weights, sizes and the tokenizer, for llama.cpp."""

    name = "gguf"
    summary = "a model of llama.cpp: a .gguf file of weights, sizes and tokenizer"
    joins_ranks = False
    naming = "gguf"

    outtype: Literal["f32", "f16", "bf16", "q8_0"] | None = None
    """The type of matrices; None: that of the source. Vectors, norms and routers are float32 if the source is no GGUF
    file, or if a type is stated."""
    config: LocalPath | None = None
    """The model's configuration, or its folder with the tokenizer; None: the configuration of the source."""
    without_tokenizer: bool | None = None
    """Leave out the tokenizer. llama.cpp then takes only numbers of tokens."""

    def detect(self, path: Path) -> bool:
        return path.is_file() and (path.suffix.lower() == SUFFIX or _begins_as_gguf(path))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.gguf.read import read_model

        return read_model(path)

    def input_files(self) -> tuple[Path, ...]:
        return () if self.config is None else (as_path(self.config),)

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.engines.gguf.write import plan_model

        return plan_model(source, self.outtype, next(iter(self.input_files()), None), not self.without_tokenizer)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.engines.gguf.write import write_model

        return write_model(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """The one file is whole when it is written."""


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except CkptError:
        raise
    except OSError:
        return False
