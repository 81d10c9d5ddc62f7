"""Megatron-LM and Megatron core: the legacy layout (a folder for each rank) and `torch_dist`.

folder      which files there are; legacy_files opens them
arguments   the run's arguments: degrees and sizes
names       local names -> names of the whole model; stages: which layers are where
chunk       a model chunk; plain_optimizer, distributed_optimizer, buffers: its states
whole       all ranks -> whole parameters, by the rules in `rule_sets`
masters     are the optimizer's masters those of the weights?
carried     everything that is not a tensor of the model
"""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.base import Checkpoint, Format, Options
from ckpt_formats.errors import form_of
from ckpt_formats.megatron.dist import read_dist
from ckpt_formats.megatron.folder import is_dist, is_iteration, is_run, iteration_of
from ckpt_formats.megatron.legacy import read_legacy
from ckpt_formats.megatron.masters import doubts_of


class Megatron(Format):
    name = "megatron"
    summary = "Megatron-LM: legacy and torch_dist checkpoints, with tensor, pipeline and expert parallelism"

    def detect(self, path: Path) -> bool:
        return is_iteration(path) or is_run(path)

    def read(self, path: Path, options: Options) -> Checkpoint:
        folder = iteration_of(path)
        with form_of("a Megatron checkpoint", folder):
            found = (read_dist if is_dist(folder) else read_legacy)(path, folder, options)
        return replace(found, doubts=doubts_of(found))
