"""Check what `ckpt commit` repeats, and show that there is nothing to do."""

import os
from collections.abc import Mapping
from typing import Any

import click

from ckpt.pipeline import complete_before
from ckpt.pipeline.job_note import JobNote
from ckpt_cli.views import job
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.errors import OutputError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.stores.location import is_url, target_path


def show_complete(target: str, as_json: bool) -> None:
    """Show that the target is complete already."""
    if as_json:
        data(job.to_json(complete_before(target_path(target))))
    else:
        conclude(f"{printable(target)} is complete: nothing to do")


def check_repeats(command: click.Command | None, target: str) -> None:
    """Raise `UnsupportedError` unless the shards were started by a command that has `--shard`."""
    if command is None or "shard" not in {parameter.name for parameter in command.params}:
        raise UnsupportedError(
            "these shards were not written by a command of ckpt",
            where=printable(target),
            hint="A program wrote them: call `commit` of its job there.",
        )


def check_target(arguments: Mapping[str, Any], shards: JobNote) -> None:
    """Raise `OutputError` if the command writes something else here than where the shards ran."""
    given = str(arguments.get("target"))
    target = given if is_url(given) else os.path.realpath(given)
    if target != (shards.target if is_url(given) else os.path.realpath(shards.target)):
        raise OutputError(
            f"in this folder, the command of the shards would write {printable(target)}",
            where=printable(shards.target),
            hint=f"Run ckpt commit in the folder in which the shards ran: {printable(shards.folder)}.",
        )
