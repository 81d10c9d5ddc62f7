"""`ckpt commit`: publish what the shards of a job have written."""

import os

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.types import CheckpointPath


@command("commit")
@click.argument("target", type=CheckpointPath())
def commit(target: str, as_json: bool) -> None:
    from ckpt.pipeline.shard import COMMIT
    from ckpt.pipeline.targets import unfinished_job
    from ckpt_cli.views import commit
    from ckpt_formats.stores.location import target_path

    job = unfinished_job(target_path(target))
    if job is None:
        commit.show_complete(target, as_json)
        return
    if os.path.isdir(job.folder):
        os.chdir(job.folder)  # paths of the command may be relative
    group = click.get_current_context().parent
    assert group is not None
    assert isinstance(group.command, click.Group)
    name, *words = job.command or ("",)
    repeated = group.command.get_command(group, name)
    commit.check_repeats(repeated, target)
    assert repeated is not None
    with repeated.make_context(name, words, parent=group) as context:
        commit.check_target(context.params, job)
        context.params |= {"shard": COMMIT, "as_json": as_json}
        repeated.invoke(context)
