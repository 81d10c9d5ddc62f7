"""Traces of an engine in a folder whose main file is missing.

A format detects a folder by the main file of its engine. If that file is missing, a more general format may detect
the folder by other files, and would read less than was saved. So before a format reads a folder, this module looks
for traces of the other engines. A folder with traces of an engine that the engine's format does not detect is an
incomplete checkpoint of that engine.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CkptError, IncompleteError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.text import printable

Names = Collection[str]

_MAX_FOLDERS = 64
_MAX_JSON = 1 << 16
_DEEPSPEED_FILE = re.compile(
    r"layer_\d+-model_\d+-model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
    r"|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt"
)
_DCP_DATA = re.compile(r"__\d+_\d+\.distcp")
_DCP_METADATA = re.compile(r"\.metadata|__\d+\.metadata|\.metadata\.tmp|__\d+\.metadata\.tmp")
_MEGATRON_RANK = re.compile(r"mp_rank_\d+(_\d+){0,2}")
_DEEPSPEED_STEP = re.compile(r"global_step\d+")
_UNIVERSAL_PACK = re.compile(r"\d{5,}\.safetensors")
_RUN_FILE = re.compile(
    r"trainer_state\.json|training_args\.bin|random_states_\d+\.pkl|rng_state(_\d+)?\.pth"
    r"|pytorch_model_fsdp.*|adapter_config\.json"
)


@dataclass(frozen=True)
class Trace:
    """How an incomplete checkpoint of an engine is detected.

    `find_missing` returns a text that names what is missing; None if the folder has no traces or is complete.
    """

    formats: tuple[str, ...]
    """The formats that read such folders when they are complete."""
    engine: str
    find_missing: Callable[[Path, Names], str | None]
    hint: str = "Copy all files of the checkpoint into one folder, hidden ones too."


def check_traces(path: Path, names: Names, format: str | None) -> None:
    """Raise `IncompleteError` for a folder that another format would read if it were complete.

    `format` is the format that detects the folder now.
    """
    for trace in TRACES:
        if format not in trace.formats and (missing := trace.find_missing(path, names)) is not None:
            raise IncompleteError(
                f"an incomplete checkpoint of {trace.engine}: {missing}", where=printable(str(path)), hint=trace.hint
            )


def check_run(path: Path, names: Names) -> None:
    """Raise `IncompleteError` for a folder with files that a trainer of Hugging Face writes, but without a model."""
    left = sorted(name for name in names if _RUN_FILE.fullmatch(name))
    if left:
        file = "adapter_model.safetensors" if left[0] == "adapter_config.json" else "model.safetensors"
        raise IncompleteError(
            f"an incomplete checkpoint of Hugging Face's libraries: {printable(left[0])} is here, but no model",
            where=printable(str(path)),
            hint=f"Copy the file of the model, such as {file}, into the folder.",
        )


def _universal(path: Path, names: Names) -> str | None:
    if "packs" not in names or "manifest.json" in names:
        return None
    packs = names_in(path / "packs")
    return "manifest.json is missing" if any(map(_UNIVERSAL_PACK.fullmatch, packs)) else None


def _deepspeed_universal(path: Path, names: Names) -> str | None:
    if "zero" not in names or (path / "zero" / "optimizer_state.pt").is_file():
        return None
    folders = names_in(path / "zero")[:_MAX_FOLDERS]
    has_weights = any((path / "zero" / name / "fp32.pt").is_file() for name in folders)
    return "zero/optimizer_state.pt is missing" if has_weights else None


def _megatron_dist(path: Path, names: Names) -> str | None:
    has_data = any(map(_DCP_DATA.fullmatch, names)) or ".metadata" in names
    has_backend = "metadata.json" in names and _has_backend(path / "metadata.json")
    if not (has_backend or ("common.pt" in names and (has_data or "metadata.json" in names))):
        return None
    missing = [name for name in (".metadata", "common.pt", "metadata.json") if name not in names]
    return f"{' and '.join(missing)} missing" if missing else None


def _has_backend(path: Path) -> bool:
    """Whether a file of Megatron core states how the shards are stored."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read(_MAX_JSON))
    except (CkptError, OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "sharded_backend" in content


def _megatron_legacy(path: Path, names: Names) -> str | None:
    ranks = [name for name in sorted(names) if _MEGATRON_RANK.fullmatch(name) and (path / name).is_dir()]
    incomplete = [name for name in ranks[:_MAX_FOLDERS] if not (path / name / "model_optim_rng.pt").is_file()]
    return f"{incomplete[0]}/model_optim_rng.pt is missing" if incomplete else None


def _deepspeed(path: Path, names: Names) -> str | None:
    file = next((name for name in sorted(names) if _DEEPSPEED_FILE.fullmatch(name)), None)
    return None if file is None else f"{file} is here, but no mp_rank_00_model_states.pt"


def _dcp(path: Path, names: Names) -> str | None:
    data = next((name for name in sorted(names) if _DCP_DATA.fullmatch(name)), None)
    is_complete = data is None or any(map(_DCP_METADATA.fullmatch, names))
    return None if is_complete else f"{data} is here, but no .metadata, which torch writes last"


def _pointer_of_deepspeed(path: Path, names: Names) -> str | None:
    steps = [name for name in sorted(names) if _DEEPSPEED_STEP.fullmatch(name) and (path / name).is_dir()]
    if not steps or "latest" in names or "latest_universal" in names:
        return None
    return f"{', '.join(steps[:5])} {'is' if len(steps) == 1 else 'are'} here, but no `latest`, which names the step"


TRACES = (
    Trace(("universal",), "ckpt", _universal),
    Trace(("deepspeed-universal",), "DeepSpeed's universal format", _deepspeed_universal),
    Trace(("megatron",), "Megatron core", _megatron_dist),
    Trace(("megatron-legacy", "megatron"), "Megatron", _megatron_legacy),
    Trace(("deepspeed", "deepspeed-universal"), "DeepSpeed", _deepspeed),
    Trace(("dcp", "megatron"), "PyTorch Distributed Checkpoint", _dcp),
)
_AROUND_A_STEP = Trace(
    ("deepspeed", "deepspeed-universal"),
    "DeepSpeed",
    _pointer_of_deepspeed,
    "Name the folder of the step, or the file of weights if they are all that is wanted.",
)


def check_around(path: Path, names: Names, format: str) -> None:
    """Raise `IncompleteError` if a format would read only the files around the folder of a DeepSpeed step."""
    if format not in _AROUND_A_STEP.formats and (missing := _AROUND_A_STEP.find_missing(path, names)) is not None:
        raise IncompleteError(
            f"an incomplete checkpoint of DeepSpeed: {missing}", where=printable(str(path)), hint=_AROUND_A_STEP.hint
        )
