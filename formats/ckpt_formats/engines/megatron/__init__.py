"""Megatron-LM and Megatron core: the legacy layout (a folder for each rank) and `torch_dist`.

folder      which files there are; legacy_files, dist_files open them
arguments   the run's arguments: degrees and sizes; new_arguments: those of another layout
names       local names <-> names of the whole model; stages: which layers are where
chunk       a model chunk; plain_optimizer, distributed_optimizer, buffers: its states
whole       all ranks -> whole parameters, by the rules in `rule_sets`; local: the inverse
masters     are the optimizer's masters those of the weights?
carried     everything that is not a tensor of the model
target      what is to be written; write_legacy, write_dist: its files
dist_keys   keys of distributed checkpoints; dist_shards, dist_objects, dist_common: what is under them, and beside
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.torchfile_tree import write_tree
from ckpt_formats.core.checkpoint import Checkpoint, FilePlan, Goal, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.errors import form_of
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.megatron.dist import write as write_dist
from ckpt_formats.engines.megatron.dist.read import read_dist
from ckpt_formats.engines.megatron.legacy import write as write_legacy
from ckpt_formats.engines.megatron.legacy.read import read_legacy
from ckpt_formats.engines.megatron.shared.folder import (
    is_broken_run,
    is_dist,
    is_legacy,
    is_of_kind,
    iteration_of,
    point_to,
)
from ckpt_formats.engines.megatron.shared.master_check import suspicions_of
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout, remarks_of, resolve_layout


class _Megatron(WritableFormat):
    even_states = True
    degrees = ("dp", "tp", "pp", "zero", "vpp", "ep", "etp", "stages")

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        folder = iteration_of(path)
        with form_of("a Megatron checkpoint", folder):
            found = (read_dist if is_dist(folder) else read_legacy)(path, folder, options)
        return replace(found, suspicions=suspicions_of(found))

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[FilePlan, ...]:
        target = resolve_layout(source, goal)
        first, *others = self.parts(target)
        remarks = (*remarks_of(target), *first.what.get("remarks", ()))
        return replace(first, what={**first.what, "remarks": remarks}), *others

    @abstractmethod
    def parts(self, target: WriteLayout) -> Sequence[FilePlan]:
        """The files of a run folder, all in the folder of one iteration."""

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        point_to(folder, Path(receipts[0].file).parts[0])

    def remarks(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str, ...]:
        return tuple(remark for part in parts for remark in part.what.get("remarks", ()))

    def losses(self, source: Checkpoint, parts: Sequence[FilePlan]) -> tuple[str, ...]:
        return tuple(loss for part in parts for loss in part.what.get("losses", ()))


class MegatronDist(_Megatron):
    name = "megatron"
    summary = "Megatron core's torch_dist checkpoints, at any degrees of parallelism"

    def detect(self, path: Path) -> bool:
        return is_of_kind(path, is_dist) or is_broken_run(path)

    def parts(self, target: WriteLayout) -> Sequence[FilePlan]:
        return write_dist.parts(target)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return write_dist.write(folder, part, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        write_dist.write_index(folder, receipts)
        super().commit(folder, source, receipts)


class MegatronLegacy(_Megatron):
    name = "megatron-legacy"
    summary = "Megatron-LM's legacy layout: a folder for each model-parallel rank"

    def detect(self, path: Path) -> bool:
        return is_of_kind(path, is_legacy)

    def parts(self, target: WriteLayout) -> Sequence[FilePlan]:
        return write_legacy.parts(target)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        (folder / part.file).parent.mkdir(parents=True, exist_ok=True)
        return write_tree(folder, part, transfer)
