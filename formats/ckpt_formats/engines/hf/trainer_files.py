"""Read the files that a trainer of Hugging Face writes around an engine's checkpoint, as extras of it."""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.checkpoint import Checkpoint, SourceFile
from ckpt_formats.core.folders import TRAINER_STATE, is_harmless
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.hf.folder import sort_files
from ckpt_formats.engines.hf.side_files import config_of, read_side_files
from ckpt_formats.state_dicts.extras import names_for_tensors
from ckpt_formats.state_dicts.run_files import PREFIX


def with_run_around(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint with the run's files in its folder as extras: `hf/trainer_state.json`, `hf/scheduler.pt`, ...

    There must be one of them (`folders.is_of_trainer`). Raises `CkptError` for files that cannot be read.
    """
    known_paths = {shard.path for shard in checkpoint.files}
    folder = sort_files(path)
    side_files = (file for file in folder.side_files if file not in known_paths and not is_harmless(file.name))
    values, shards, large = read_side_files(side_files)
    files_read: list[SourceFile] = []
    seals: list[Seal] = []
    training_files = (*folder.training, *((folder.optimizer,) if folder.optimizer else ()))
    for file in (file for file in training_files if file not in known_paths):
        opened = open_file(file)
        values[file.name] = opened.root
        files_read.append(SourceFile(file, file.stat().st_size, "other"))
        seals += opened.seals()
    parameters, extras = dict(checkpoint.parameters), dict(checkpoint.extras)
    for name, value in values.items():
        key = f"{PREFIX}{name}"
        extras.setdefault(key, names_for_tensors(value, key, parameters))
    step: Value = (config_of(values, TRAINER_STATE) or {}).get("global_step")
    origin = (
        replace(checkpoint.origin, step=step)
        if checkpoint.origin.step is None and is_natural(step)
        else checkpoint.origin
    )
    notices = (Notice("too large to copy, not read", tuple(large), Weight.LOST),) if large else ()
    return replace(
        checkpoint,
        origin=origin,
        parameters=parameters,
        extras=extras,
        files=(*checkpoint.files, *shards, *files_read),
        seals=(*checkpoint.seals, *seals),
        notices=(*checkpoint.notices, *notices),
    )
