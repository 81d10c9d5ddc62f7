"""What an engine leaves in a folder whose marking file is lost.

A format knows a folder by the file that its engine writes last, or that says the most. Where that file is lost,
a more general format may know the folder by what else lies there, and would read less than was saved. So before a
format takes a folder, the others' traces are looked for in it. A folder in which an engine has left traces, and
which that engine's format does not know, is an incomplete checkpoint of that engine.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CkptError, Incomplete
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.text import printable

Names = Collection[str]

MAX_NAMES = 200_000
"""Entries of a folder that are looked at."""
_MAX_FOLDERS = 64
_MAX_JSON = 1 << 16
_OF_DEEPSPEED = re.compile(
    r"layer_\d+-model_\d+-model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
    r"|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt"
)
_OF_DCP = re.compile(r"__\d+_\d+\.distcp")
_METADATA_OF_DCP = re.compile(r"\.metadata|__\d+\.metadata|\.metadata\.tmp|__\d+\.metadata\.tmp")
_RANK_OF_MEGATRON = re.compile(r"mp_rank_\d+(_\d+){0,2}")
_STEP_OF_DEEPSPEED = re.compile(r"global_step\d+")
_PARAMETER_OF_OURS = re.compile(r".*-[0-9a-f]{20}\.safetensors")
_OF_A_RUN = re.compile(
    r"trainer_state\.json|training_args\.bin|random_states_\d+\.pkl|rng_state(_\d+)?\.pth"
    r"|pytorch_model_fsdp.*|adapter_config\.json"
)


@dataclass(frozen=True)
class Trace:
    """How an engine's checkpoint is known that its format does not know: `lost` gives what is missing, or None."""

    formats: tuple[str, ...]
    """Those that read such folders when they are whole."""
    engine: str
    lost: Callable[[Path, Names], str | None]
    hint: str = "Copy all files of the checkpoint into one folder, hidden ones too."


def check_traces(path: Path, names: Names, format: str | None) -> None:
    """Raises `Incomplete` for what is left of a checkpoint which another format would know if it were whole.

    `format` is the one that would take the folder.
    """
    for trace in TRACES:
        if format not in trace.formats and (lost := trace.lost(path, names)) is not None:
            raise Incomplete(
                f"an incomplete checkpoint of {trace.engine}: {lost}", where=printable(str(path)), hint=trace.hint
            )


def check_run(path: Path, names: Names) -> None:
    """Raises `Incomplete` for what a trainer of Hugging Face's leaves of a run, without a model."""
    left = sorted(name for name in names if _OF_A_RUN.fullmatch(name))
    if left:
        raise Incomplete(
            f"an incomplete checkpoint of Hugging Face's libraries: {printable(left[0])} is here, but no model",
            where=printable(str(path)),
            hint="Copy the file of the model, such as model.safetensors, into the folder.",
        )


def names_in(path: Path) -> list[str]:
    """What a folder holds, up to a bound; nothing, if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(MAX_NAMES), strict=False))
    except OSError:
        return []


def _universal(path: Path, names: Names) -> str | None:
    if "parameters" not in names or "manifest.json" in names:
        return None
    held = names_in(path / "parameters")
    return "manifest.json is missing" if any(map(_PARAMETER_OF_OURS.fullmatch, held)) else None


def _deepspeed_universal(path: Path, names: Names) -> str | None:
    if "zero" not in names or (path / "zero" / "optimizer_state.pt").is_file():
        return None
    folders = names_in(path / "zero")[:_MAX_FOLDERS]
    held = any((path / "zero" / name / "fp32.pt").is_file() for name in folders)
    return "zero/optimizer_state.pt is missing" if held else None


def _megatron_dist(path: Path, names: Names) -> str | None:
    data = any(map(_OF_DCP.fullmatch, names)) or ".metadata" in names
    said = "metadata.json" in names and _says_backend(path / "metadata.json")
    if not (said or ("common.pt" in names and (data or "metadata.json" in names))):
        return None
    lacking = [name for name in (".metadata", "common.pt", "metadata.json") if name not in names]
    return f"{' and '.join(lacking)} missing" if lacking else None


def _says_backend(path: Path) -> bool:
    """Does Megatron core's file say how the shards are stored?"""
    try:
        with open_regular(path) as file:
            said = json.loads(file.read(_MAX_JSON))
    except (CkptError, OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and "sharded_backend" in said


def _megatron_legacy(path: Path, names: Names) -> str | None:
    ranks = [name for name in sorted(names) if _RANK_OF_MEGATRON.fullmatch(name) and (path / name).is_dir()]
    lacking = [name for name in ranks[:_MAX_FOLDERS] if not (path / name / "model_optim_rng.pt").is_file()]
    return f"{lacking[0]}/model_optim_rng.pt is missing" if lacking else None


def _deepspeed(path: Path, names: Names) -> str | None:
    own = next((name for name in sorted(names) if _OF_DEEPSPEED.fullmatch(name)), None)
    return None if own is None else f"{own} is here, but no mp_rank_00_model_states.pt"


def _dcp(path: Path, names: Names) -> str | None:
    data = next((name for name in sorted(names) if _OF_DCP.fullmatch(name)), None)
    whole = data is None or any(map(_METADATA_OF_DCP.fullmatch, names))
    return None if whole else f"{data} is here, but no .metadata, which torch writes last"


def _pointer_of_deepspeed(path: Path, names: Names) -> str | None:
    steps = [name for name in sorted(names) if _STEP_OF_DEEPSPEED.fullmatch(name) and (path / name).is_dir()]
    if not steps or "latest" in names or "latest_universal" in names:
        return None
    return f"{', '.join(steps[:5])} {'is' if len(steps) == 1 else 'are'} here, but no `latest`, which says the step"


TRACES = (
    Trace(("universal",), "ckpt", _universal),
    Trace(("deepspeed-universal",), "DeepSpeed's universal format", _deepspeed_universal),
    Trace(("megatron",), "Megatron core", _megatron_dist),
    Trace(("megatron-legacy", "megatron"), "Megatron", _megatron_legacy),
    Trace(("deepspeed", "deepspeed-universal"), "DeepSpeed", _deepspeed),
    Trace(("dcp", "megatron"), "PyTorch Distributed Checkpoint", _dcp),
)
_INSIDE = Trace(
    ("deepspeed", "deepspeed-universal"),
    "DeepSpeed",
    _pointer_of_deepspeed,
    "Name the folder of the step, or the file of weights if they are all that is wanted.",
)


def check_around(path: Path, names: Names, format: str) -> None:
    """Raises `Incomplete` if a format takes a folder for what lies around an engine's folder of a step in it."""
    if format not in _INSIDE.formats and (lost := _INSIDE.lost(path, names)) is not None:
        raise Incomplete(
            f"an incomplete checkpoint of DeepSpeed: {lost}", where=printable(str(path)), hint=_INSIDE.hint
        )
