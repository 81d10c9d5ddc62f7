"""One step of a DeepSpeed run with all its files opened. Only headers are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.identity import in_threads
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.deepspeed.agreement import check_files
from ckpt_formats.engines.deepspeed.folder import Folder


@dataclass(frozen=True)
class OpenedStep:
    """The files of one step, and the parallel degrees of the run. `mp_rank = pp_rank * tp + tp_rank`."""

    folder: Folder
    files: Mapping[Path, TorchFile]
    tp: int
    pp: int

    @property
    def first(self) -> TorchFile:
        """The model file of rank 0."""
        return self.models(0)[0]

    @property
    def stage3(self) -> bool:
        """Is the checkpoint of ZeRO stage 3?"""
        return bool(self.folder.model3)

    @property
    def config(self) -> Mapping[str, Value]:
        """The run's configuration."""
        config = self.first.root.get("ds_config")
        return config if isinstance(config, dict) else {}

    def models(self, mp: int) -> list[TorchFile]:
        """The model file of a model-parallel rank; at stage 3, the files of its data-parallel ranks, in order."""
        return [self.files[path] for path in _models(self.folder, mp)]

    def optims(self, mp: int) -> list[TorchFile]:
        """The optimizer files of a model-parallel rank, in the order of data-parallel ranks; none at stage 0."""
        return [self.files[path] for (rank, _), path in sorted(self.folder.optim.items()) if rank == mp]


def open_step(folder: Folder) -> OpenedStep:
    """Open all files. Raises `IncompleteError` or `CorruptError` if they are not the files of one step of one run."""
    paths = [path for path, *_ in _roles(folder)]
    files = dict(zip(paths, in_threads(open_file, paths), strict=True))
    for path, file in files.items():
        if not isinstance(file.root, dict):
            raise CorruptError("expected a mapping, as in every file of a DeepSpeed checkpoint", where=path)
    models = [files[path] for mp in range(folder.mp) for path in _models(folder, mp)]
    check_files(folder, files, models)
    return OpenedStep(folder, files, *_degrees(folder, models[0]))


def source_files(step: OpenedStep) -> Iterator[SourceFile]:
    """Every file of the step, with its role and its rank."""
    for path, role, mp, more in _roles(step.folder):
        rank = {} if mp is None else {"pp": mp // step.tp, "tp": mp % step.tp}
        yield SourceFile(path, path.stat().st_size, role, {**rank, **more})


def rank_name(path: Path) -> str:
    """The part of a file's name that states its rank, such as `zero_pp_rank_1_mp_rank_00`."""
    return path.name.removesuffix("_model_states.pt").removesuffix("_optim_states.pt").removeprefix("bf16_")


def _roles(folder: Folder) -> Iterator[tuple[Path, str, int | None, dict[str, int]]]:
    for mp, path in folder.model.items():
        yield path, "model", mp, {}
    for (mp, dp), path in folder.model3.items():
        yield path, "model", mp, {"dp": dp}
    for (mp, dp), path in folder.optim.items():
        yield path, "optimizer", mp, {"dp": dp}
    for (mp, ep), path in folder.expert_optim.items():
        yield path, "optimizer", mp, {"ep": ep}
    for (mp, _, expert), path in folder.experts.items():
        yield path, "model", mp, {"expert": expert}
    for (layer, tp), path in folder.layers.items():
        yield path, "model", None, {"tp": tp, "layer": layer}


def _models(folder: Folder, mp: int) -> list[Path]:
    if mp in folder.model:
        return [folder.model[mp]]
    return [path for (rank, _), path in sorted(folder.model3.items()) if rank == mp]


def _degrees(folder: Folder, first: TorchFile) -> tuple[int, int]:
    """(tensor-parallel, pipeline-parallel) degree. Files of DeepSpeed before 0.16 do not state it; their names do."""
    stated = first.root.get("checkpoint_parallel_dimensions")
    if isinstance(stated, dict) and is_natural(stated.get("tp_degree")) and is_natural(stated.get("pp_degree")):
        tp, pp = stated["tp_degree"], stated["pp_degree"]
    else:
        tp = 1 + max((rank for _, rank in folder.layers), default=folder.mp - 1)
        pp = -(-folder.mp // tp)
    if tp * pp != folder.mp:
        raise IncompleteError(
            f"{tp} tensor-parallel by {pp} pipeline ranks are {tp * pp} model-parallel ranks, but {folder.mp} are here",
            where=folder.path,
            hint="Copy the files of all ranks into one folder.",
        )
    for layer in dict.fromkeys(layer for layer, _ in folder.layers):
        ranks = {rank for number, rank in folder.layers if number == layer}
        if wrong_ranks := sorted(ranks ^ set(range(tp))):
            problem = "missing" if wrong_ranks[0] < tp else "of a rank that does not exist"
            raise IncompleteError(
                f"layer_{layer:02}-model_{wrong_ranks[0]:02}-model_states.pt is {problem}: "
                f"there are {tp} tensor-parallel ranks",
                where=folder.path,
                hint="Copy the files of all ranks into one folder.",
            )
    return tp, pp
