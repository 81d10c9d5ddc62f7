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
_MAX_SHOWN = 60
"""Bytes of a pointer that a message shows."""
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


TRACES = (
    Trace(("universal",), "ckpt", _universal),
    Trace(("deepspeed-universal",), "DeepSpeed's universal format", _deepspeed_universal),
    Trace(("megatron",), "Megatron core", _megatron_dist),
    Trace(("megatron-legacy", "megatron"), "Megatron", _megatron_legacy),
    Trace(("deepspeed", "deepspeed-universal"), "DeepSpeed", _deepspeed),
    Trace(("dcp", "megatron"), "PyTorch Distributed Checkpoint", _dcp),
)


@dataclass(frozen=True)
class RunLayout:
    """How an engine arranges the folder of a run: a folder for each step, and a file that names the last one."""

    formats: tuple[str, ...]
    """The formats that read it."""
    engine: str
    step: re.Pattern[str]
    """The names of the folders of steps."""
    pointer: str
    inside: re.Pattern[str]
    """A name in the folder of a step by which it is the engine's."""


_RUNS = (
    RunLayout(("deepspeed", "deepspeed-universal"), "DeepSpeed", _DEEPSPEED_STEP, "latest", re.compile(".*")),
    RunLayout(
        ("deepspeed-universal", "deepspeed"),
        "DeepSpeed's universal format",
        re.compile(r"global_step\d+_universal"),
        "latest_universal",
        re.compile("zero"),
    ),
    RunLayout(
        ("megatron", "megatron-legacy"),
        "Megatron",
        re.compile(r"iter_\d{7,}|release"),
        "latest_checkpointed_iteration.txt",
        re.compile(rf"common\.pt|{_MEGATRON_RANK.pattern}"),
    ),
)
_NAME_THE_STEP = (
    "Name the folder of the step, or the file of weights if you need only them. `ckpt inspect` lists what is here."
)


def check_around(path: Path, names: Names, format: str) -> None:
    """Raise `IncompleteError` if a format would read only the files around the steps of a run of another engine.

    The engine's own format reads the run as soon as its pointer names a step. So the pointer is missing, or damaged.
    """
    for run in _RUNS:
        if format in run.formats:
            continue
        steps = [name for name in sorted(names) if run.step.fullmatch(name) and _is_step(path / name, run)]
        if not steps:
            continue
        here = f"{', '.join(steps[:5])} {'is' if len(steps) == 1 else 'are'} here"
        missing = f"{here}, but no `{run.pointer}`, which names the step"
        if run.pointer in names:
            missing = f"{here}, but `{run.pointer}` is damaged: {_content(path / run.pointer)}"
        raise IncompleteError(
            f"an incomplete checkpoint of {run.engine}: {missing}", where=printable(str(path)), hint=_NAME_THE_STEP
        )


def _is_step(path: Path, run: RunLayout) -> bool:
    return path.is_dir() and any(map(run.inside.fullmatch, names_in(path)))


def _content(pointer: Path) -> str:
    """What a pointer contains, for messages."""
    if not pointer.is_file():
        return "it is not a file"
    try:
        with open_regular(pointer) as file:
            text = file.read(_MAX_SHOWN).decode("utf-8", "replace").strip()
    except (CkptError, OSError):
        return "it cannot be read"
    return f"it contains {printable(text)!r}, which names none of them"
