"""`ckpt doctor`: does ckpt work here, and what is missing for which feature?"""

import os
from pathlib import Path

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.types import CheckpointPath

UNFIT = 24
"""The exit code if something that is needed is missing."""


@command("doctor")
@click.argument("path", type=CheckpointPath(), default=".", required=False)
def doctor(path: str, as_json: bool) -> None:
    from ckpt.doctor import examine
    from ckpt_cli.views.doctor import show
    from ckpt_formats.core.errors import NotFoundError, UnsupportedError
    from ckpt_formats.core.text import printable
    from ckpt_formats.stores.location import is_url

    if is_url(path):
        raise UnsupportedError(
            "`ckpt doctor` tries the file system of a folder, and no store",
            where=printable(path),
            hint="Without PATH, it says for which stores credentials are present.",
        )
    place = Path(path)
    folder = place.parent if place.is_file() else place
    if not folder.is_dir():
        raise NotFoundError(
            "there is no such folder",
            where=printable(path),
            hint="Name an existing folder, such as the one in which the target will be.",
        )
    examination = examine(folder, os.environ, Path(os.path.expanduser("~")))
    show(examination, as_json)
    if not examination.is_fit:
        raise SystemExit(UNFIT)
