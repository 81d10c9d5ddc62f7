"""Megatron-LM and Megatron core: the legacy layout (a folder for each rank) and `torch_dist`.

legacy        opens, reads and writes the legacy layout (`files`, `read`, `write`)
torch_dist    the same for distributed checkpoints, by their keys (`keys`, `shards`, `objects`, ...)
shared        what both have in common:
  folder            which kind of folder it is, and its iteration
  arguments         the run's arguments: degrees and sizes
  names             a rank's names <-> names of the full model; `stages`: which layers are where
  model_chunk       a model chunk; `plain_optimizer`, `distributed_optimizer`, `buffers`: its states
  merge             all ranks -> full parameters, by the rules in `core/rule_sets`; `split`: the inverse
  master_check      checks that the optimizer's masters belong to the weights
  extras            everything that is not a tensor of the model
  write_layout      the layout to write, and its run's arguments; further `write_*`: the content of its files
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_formats.core.arguments import LocalPath, as_path
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import form_of
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import unsure
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.megatron.shared.folder import (
    is_broken_run,
    is_dist,
    is_legacy,
    is_of_kind,
    iteration_of,
    point_to,
)
from ckpt_formats.engines.megatron.shared.options import LayoutOptions

if TYPE_CHECKING:
    from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout


@dataclass(frozen=True, kw_only=True)
class _Megatron(LayoutOptions, WritableFormat):
    naming = "megatron"
    is_of_engine = True
    even_states = True

    config: LocalPath | None = None
    """The configuration of a Hugging Face model, or its folder; None: the configuration of the source."""

    def input_files(self) -> tuple[Path, ...]:
        return () if self.config is None else (as_path(self.config),)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        from ckpt_formats.engines.megatron.shared.master_check import suspicions_of

        folder = iteration_of(path)
        with form_of("a Megatron checkpoint", folder):
            if is_dist(folder):
                from ckpt_formats.engines.megatron.torch_dist.read import read_dist

                checkpoint = read_dist(path, folder, options)
            else:
                from ckpt_formats.engines.megatron.legacy.read import read_legacy

                checkpoint = read_legacy(path, folder, options)
        return replace(checkpoint, suspicions=suspicions_of(checkpoint))

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.engines.megatron.shared.write_layout import remarks_of, resolve_layout

        layout = resolve_layout(source, self)
        plan = self.plan_layout(layout)
        return replace(plan, notes=(*unsure(remarks_of(layout)), *plan.notes))

    @abstractmethod
    def plan_layout(self, layout: "WriteLayout") -> Plan:
        """The files of a run folder, all in the folder of one iteration."""

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        point_to(folder, Path(receipts[0].file).parts[0])


@dataclass(frozen=True, kw_only=True)
class MegatronDist(_Megatron):
    """Megatron core's torch_dist checkpoints, at any degrees of parallelism."""

    name = "megatron"
    summary = "Megatron core's torch_dist checkpoints, at any degrees of parallelism"

    def detect(self, path: Path) -> bool:
        return is_of_kind(path, is_dist) or is_broken_run(path)

    def plan_layout(self, layout: "WriteLayout") -> Plan:
        from ckpt_formats.engines.megatron.torch_dist.write import plan

        return plan(layout)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.engines.megatron.torch_dist.write import write

        return write(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        from ckpt_formats.engines.megatron.torch_dist.write import write_index

        write_index(folder, receipts)
        super().commit(folder, source, receipts)


@dataclass(frozen=True, kw_only=True)
class MegatronLegacy(_Megatron):
    """Megatron-LM's legacy layout: a folder for each model-parallel rank."""

    name = "megatron-legacy"
    summary = "Megatron-LM's legacy layout: a folder for each model-parallel rank"

    def detect(self, path: Path) -> bool:
        return is_of_kind(path, is_legacy)

    def plan_layout(self, layout: "WriteLayout") -> Plan:
        from ckpt_formats.engines.megatron.legacy.write import plan

        return plan(layout)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        from ckpt_formats.containers.torchfile_tree import write_tree

        (folder / part.file).parent.mkdir(parents=True, exist_ok=True)
        return write_tree(folder, part, transfer)
