"""What a trainer of Hugging Face's leaves around the checkpoint of an engine that it runs: carried with it."""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.checkpoint import Checkpoint, SourceFile
from ckpt_formats.core.files import Seal
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Value
from ckpt_formats.detection.unread_files import is_harmless
from ckpt_formats.engines.hf.folder import CONFIG, TRAINER_STATE, is_training_file, names_in_run, sort_files
from ckpt_formats.engines.hf.side_files import PREFIX, config_of, read_side_files
from ckpt_formats.state_dicts.extras import names_for_tensors


def with_run_around(found: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint with the files of the run in its folder as extras: `hf/trainer_state.json`, `hf/scheduler.pt`, ...

    It is unchanged if the folder has none. Raises `CkptError` for files that cannot be read.
    """
    names = names_in_run(path)
    if not any(name == CONFIG or is_training_file(name) for name in names):
        return found
    read = {shard.path for shard in found.files}
    folder = sort_files(path)
    others = (one for one in folder.others if one not in read and not is_harmless(one.name))
    values, shards, large = read_side_files(others)
    more: list[SourceFile] = []
    seals: list[Seal] = []
    trained = (*folder.training, *((folder.optimizer,) if folder.optimizer else ()))
    for file in (one for one in trained if one not in read):
        opened = open_file(file)
        values[file.name] = opened.root
        more.append(SourceFile(file, file.stat().st_size, "other"))
        seals += opened.seals()
    parameters, extras = dict(found.parameters), dict(found.extras)
    for name, value in values.items():
        key = f"{PREFIX}{name}"
        extras.setdefault(key, names_for_tensors(value, key, parameters))
    step: Value = (config_of(values, TRAINER_STATE) or {}).get("global_step")
    origin = replace(found.origin, step=step) if found.origin.step is None and is_natural(step) else found.origin
    notices = (Notice("not read, being too large to carry", tuple(large), Weight.LOST),) if large else ()
    return replace(
        found,
        origin=origin,
        parameters=parameters,
        extras=extras,
        files=(*found.files, *shards, *more),
        seals=(*found.seals, *seals),
        notices=(*found.notices, *notices),
    )
