"""`ckpt verify`: is a checkpoint whole and undamaged?"""

import click

from ckpt_cli.options import CheckpointPath, PathsCommand, SourceOptions, as_json, common, effort, reading


@click.command(cls=PathsCommand)
@click.argument("path", type=CheckpointPath())
@click.option("--replay", is_flag=True, help="Do all logged steps of a chain again, and compare with what the run had.")
@effort
@reading
@as_json
@common
def verify(path: str, replay: bool, workers: int | None, memory: int, reading: SourceOptions, as_json: bool) -> None:
    """Read all of the checkpoint at PATH and check everything that can be checked.

    That all ranks' files are there and belong together; that every tensor is
    covered exactly once; every checksum the files hold (PyTorch writes CRC-32s
    that it never reads); that replicas agree, and that the model's copies are
    their masters, rounded. Of a chain, every step. All damage is named, not only the
    first. Exit code 0 if all is well, 20 if not.

    With --replay, the steps in a chain's log of gradients are done again: the first
    step and tensor are named that differ from what the run had.

    \b
    Examples:
      ckpt verify run/global_step1000
      ckpt verify step1000 --json
    """
    from pathlib import Path

    from ckpt_cli import work
    from ckpt_cli.views import verify as verification

    if not verification.verify(Path(path), reading, work.effort_of(workers, memory), replay, as_json):
        raise SystemExit(20)
