"""`ckpt copy`: a checkpoint or a chain as it is, between folders and stores."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.copy import copied
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.copy import Copied


@command("copy")
@click.argument("source", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@copied
@resources()
def copy(source: str, target: str, copied: "Copied", resources: "Execution", as_json: bool) -> None:
    from ckpt.copying.copy import Copy
    from ckpt_cli.views import copy

    if copied.updates:
        copy.update(source, target, copied.every, resources, as_json)
    elif copied.dry_run:
        copy.show_plan(Copy(source, target, copied.everything), as_json)
    else:
        copy.run(Copy(source, target, copied.everything), copied.protect, resources, as_json)
