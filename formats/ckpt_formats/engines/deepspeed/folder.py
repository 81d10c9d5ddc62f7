"""List the files of a DeepSpeed checkpoint by rank. Only names are read; no file is opened.

In DeepSpeed's file names, `zero_pp_rank` is the data-parallel rank, and
`mp_rank` is `pp_rank * tp + tp_rank`.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.claims import MAX_POINTER
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import open_regular, unreadable
from ckpt_formats.core.identity import unrecorded
from ckpt_formats.core.text import printable

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_STEP_FILES = (_MODEL, _MODEL3, _OPTIM)
_KINDS = (*_STEP_FILES, _EXPERT_OPTIM, _EXPERT, _LAYER)


@dataclass(frozen=True)
class Folder:
    """The files of one step, keyed by rank."""

    path: Path
    model: dict[int, Path]
    """Stages 0 to 2: by model-parallel rank."""
    model3: dict[tuple[int, int], Path]
    """Stage 3: by (model-parallel, data-parallel) rank."""
    optim: dict[tuple[int, int], Path]
    """Stages 1 to 3: by (model-parallel, data-parallel) rank."""
    expert_optim: dict[tuple[int, int], Path]
    """Stage 0 with experts: by (model-parallel, expert-parallel) rank."""
    experts: dict[tuple[int, int, int], Path]
    """By (model-parallel rank, MoE layer, global expert)."""
    layers: dict[tuple[int, int], Path]
    """Pipeline: by (layer of the module list, tensor-parallel rank)."""

    @property
    def mp(self) -> int:
        """The model-parallel degree: the highest rank in a file name, plus 1."""
        return 1 + max([*self.model, *(mp for mp, _ in (*self.model3, *self.optim))], default=-1)

    @property
    def dp(self) -> int:
        """The data-parallel degree: the highest rank in a file name, plus 1; 0 if no file name states it."""
        return 1 + max((dp for _, dp in (*self.model3, *self.optim)), default=-1)


def rank_in_name(name: str) -> tuple[int, ...] | None:
    """The kind of a file and the numbers in its name; None if DeepSpeed gives no file such a name."""
    for kind, pattern in enumerate(_KINDS):
        if match := pattern.fullmatch(name):
            return kind, *map(int, match.groups())
    return None


def is_step(path: Path) -> bool:
    """Does this folder contain the files of one step?"""
    try:
        return path.is_dir() and any(any(kind.fullmatch(p.name) for kind in _STEP_FILES) for p in path.iterdir())
    except OSError:
        return False


def has_latest(path: Path) -> bool:
    """Is this a folder of several steps, written by DeepSpeed? Other programs also write a file `latest`."""
    if not (path / "latest").is_file() or (path / "latest_checkpointed_iteration.txt").exists():
        return False
    try:
        with open_regular(path / "latest") as file:
            tag = file.read(MAX_POINTER).decode("utf-8", "replace").strip()
        named = path / Path(tag).name
        return not (named.is_dir() and any(named.iterdir())) or any(map(is_step, path.iterdir()))
    except (CkptError, OSError, ValueError):
        return True


def step_of(path: Path, pointer: str = "latest", is_step: Callable[[Path], bool] = is_step) -> Path:
    """The folder of one step: the path itself, or the folder that its file `latest` names.

    Raises `CorruptError` if that file contains no name, `NotFoundError` if it names no step.
    """
    if is_step(path):
        return path
    latest = path / pointer
    try:
        with unrecorded(), open_regular(latest) as file:
            raw = file.read(MAX_POINTER + 1)
        steps = sorted(entry.name for entry in path.iterdir() if is_step(entry))
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, latest) from error
    tag = raw.decode("utf-8", "replace").strip()
    hint = f"Name one step: {', '.join(printable(s) for s in steps)}." if steps else "No step is here."
    if not tag or len(raw) > MAX_POINTER or Path(tag).name != tag or tag in (".", ".."):
        raise CorruptError(
            f"`{pointer}` contains {printable(tag[:60])!r}, which is not the name of a folder next to it",
            where=latest,
            hint=hint,
        )
    if not is_step(path / tag):
        raise NotFoundError(f"`{pointer}` names {printable(tag)!r}, which is not a checkpoint", where=latest, hint=hint)
    return path / tag


def list_folder(path: Path) -> Folder:
    """The files of a step by rank. Raises `IncompleteError` if files of some ranks are missing."""
    folder = sort_files(path)
    if folder.model and folder.model3:
        raise CorruptError("files of stage 3 and of an earlier stage are in one folder", where=path, hint=_MIXED)
    check_models(folder)
    _check_experts(folder)
    if folder.optim or folder.model3:
        prefix = optim_prefix(folder)
        _check_grid(prefix + "zero_pp_rank_{dp}_mp_rank_{mp:02}_optim_states.pt", folder, folder.optim, folder.dp)
    return folder


def sort_files(path: Path) -> Folder:
    """The files of a step by rank, without a check that files of all ranks are there."""
    folder = Folder(path, {}, {}, {}, {}, {}, {})
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error
    for name in names:
        file = path / name
        if match := _MODEL.fullmatch(name):
            folder.model[int(match[1])] = file
        elif match := _MODEL3.fullmatch(name):
            _put(folder.model3, (int(match[2]), int(match[1])), file)
        elif match := _OPTIM.fullmatch(name):
            _put(folder.optim, (int(match[2]), int(match[1])), file)
        elif match := _EXPERT_OPTIM.fullmatch(name):
            _put(folder.expert_optim, (int(match[2]), int(match[1])), file)
        elif match := _EXPERT.fullmatch(name):
            folder.experts[int(match[3]), int(match[1]), int(match[2])] = file
        elif match := _LAYER.fullmatch(name):
            folder.layers[int(match[1]), int(match[2])] = file
    if (path / "offloaded_tensors").is_dir():
        raise UnsupportedError(
            "the optimizer state was offloaded to NVMe and is in raw swap files",
            where=path,
            hint="Save once more with `pipeline_write` off, or offload to the CPU.",
        )
    return folder


_MIXED = "Two runs were saved into it: separate them."


def optim_prefix(folder: Folder) -> str:
    """What names of files of optimizer states begin with here, such as `bf16_`; mostly nothing."""
    return next((file.name.partition("zero_pp_rank_")[0] for file in folder.optim.values()), "")


def check_models(folder: Folder) -> None:
    """Raise `IncompleteError` if the model file of a rank is missing."""
    if folder.model3:
        _check_grid("zero_pp_rank_{dp}_mp_rank_{mp:02}_model_states.pt", folder, folder.model3, folder.dp)
    else:
        _check_grid("mp_rank_{mp:02}_model_states.pt", folder, {(mp, 0) for mp in folder.model}, 1)


def _check_experts(folder: Folder) -> None:
    """Raise `IncompleteError` if a file of an expert is missing, `CorruptError` if one is of a rank without a model
    file."""
    by_layer: dict[tuple[int, int], set[int]] = {}
    for mp, layer, expert in folder.experts:
        by_layer.setdefault((mp, layer), set()).add(expert)
    for (mp, layer), experts in by_layer.items():
        missing = next((number for number in range(len(experts)) if number not in experts), None)
        if missing is not None:
            raise IncompleteError(
                f"layer_{layer}_expert_{missing}_mp_rank_{mp:02}_model_states.pt is missing "
                f"({len(experts)} of the {max(experts) + 1} experts of this layer are here)",
                where=folder.path,
                hint="Copy the files of all experts into one folder.",
            )
        if mp >= folder.mp:
            name = folder.experts[mp, layer, 0].name
            raise CorruptError(f"{name} is of a rank that has no model file", where=folder.path, hint=_MIXED)
    layers = {mp: {layer for rank, layer in by_layer if rank == mp} for mp, _ in by_layer}
    for mp, present in layers.items():
        if (missing := next((layer for layer in range(max(present)) if layer not in present), None)) is not None:
            raise IncompleteError(
                f"layer_{missing}_expert_0_mp_rank_{mp:02}_model_states.pt is missing: "
                f"MoE layer {max(present)} has files",
                where=folder.path,
                hint="Copy the files of all experts into one folder.",
            )


def _check_grid(pattern: str, folder: Folder, present: Collection[tuple[int, int]], width: int) -> None:
    """Raise `IncompleteError` if a rank is missing; `pattern` is the name of its file, with `dp` and `mp` to fill in.

    Numbers in file names may be huge: no table of all ranks is built.
    """
    if len(present) < folder.mp * width:
        ranks = ((mp, dp) for mp in range(folder.mp) for dp in range(width))
        mp, dp = next(rank for rank in ranks if rank not in present)
        raise IncompleteError(
            f"{pattern.format(dp=dp, mp=mp)} is missing ({len(present)} of {folder.mp * width} such files are here)",
            where=folder.path,
            hint="Copy the files of all ranks into one folder.",
        )


def _put(table: dict[tuple[int, int], Path], key: tuple[int, int], file: Path) -> None:
    if key in table:
        raise CorruptError(f"{table[key].name} and {file.name} are both of one rank", where=file.parent, hint=_MIXED)
    table[key] = file
