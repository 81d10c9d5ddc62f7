"""Whose names a checkpoint's tensors are to have: the user's choice, or what the target's format needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import edits as selection
from ckpt.edits import Edits
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.values import Record

if TYPE_CHECKING:
    from ckpt_formats.names import Naming

_MEGATRON = ("megatron", "megatron-legacy")


def edited(source: Checkpoint, edits: Edits, format_name: str, config: Path | None = None) -> Checkpoint:
    """The checkpoint with all changes that the user asks for, and under the names that the format needs."""
    left_out = bool(edits.only or edits.skip)
    found = selection.only(source, edits.only, edits.skip) if left_out else source
    if edits.model_only:
        found = selection.model_only(found)
    found = renamed(found, edits.names, format_name, config, partial=left_out)
    return selection.cast(found, edits.dtype) if edits.dtype else found


def renamed(
    checkpoint: Checkpoint,
    asked: "Naming | None",
    format_name: str,
    config: Path | None = None,
    *,
    partial: bool = False,
) -> Checkpoint:
    """The checkpoint under the names that the user asks for; if none, under those that the format needs.

    `config` is the file or folder that the user names; `partial` says that tensors were left out. Nothing is read but
    the configuration. Raises `CkptError` of the kind that fits for a model that cannot have these names.
    """
    if asked is None and config is None and format_name not in ("hf", *_MEGATRON):
        return checkpoint
    # Tables of many models: not to be imported for a copy from one format of ours to another.
    from ckpt_formats.engines.hf.model_names import with_model_names
    from ckpt_formats.engines.hf.side_files import config_of
    from ckpt_formats.engines.hf.write import beside_files
    from ckpt_formats.names import naming_of, to_core, to_hf, to_legacy, to_megatron
    from ckpt_formats.names.config import CONFIG

    now = naming_of(checkpoint)
    said = config_of(beside_files(config)) if config is not None else config_of(checkpoint.extras, CONFIG)
    wanted = asked or _needed(checkpoint, now, format_name, said, config is not None)
    if wanted is None:
        return checkpoint
    if wanted == "hf":
        if now in _MEGATRON:
            return to_hf(checkpoint, said, partial=partial)
        return with_model_names(checkpoint, said) if said is not None else checkpoint
    if now not in _MEGATRON:
        spelled = with_model_names(checkpoint, said) if said is not None else checkpoint
        checkpoint = to_megatron(spelled, said, partial=partial)
    return to_legacy(checkpoint) if wanted == "megatron-legacy" else to_core(checkpoint)


def _needed(
    checkpoint: Checkpoint, now: "Naming | None", format_name: str, config: Mapping[str, Any] | None, named: bool
) -> "Naming | None":
    """The names without which a checkpoint of this format is of no use, if they can be told."""
    from ckpt_formats.names import table_for
    from ckpt_formats.names.from_arguments import ARGUMENTS

    known = config is not None and table_for(config) is not None
    if format_name == "hf" and now in _MEGATRON:
        return "hf" if named or known or isinstance(checkpoint.extras.get(ARGUMENTS), Record) else None
    return "megatron" if format_name in _MEGATRON and now not in _MEGATRON and known else None
