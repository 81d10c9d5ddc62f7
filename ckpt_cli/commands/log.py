"""`ckpt log`: what a chain holds."""

import click

from ckpt_cli.options import CheckpointPath, PathsCommand, as_json, common


@click.command(cls=PathsCommand)
@click.argument("chain", type=CheckpointPath())
@as_json
@common
def log(chain: str, as_json: bool) -> None:
    """Show the steps that CHAIN has: sizes, ratios, and whether they are exact.

    For each step: what is stored for it, what it takes decoded, what must be read
    to restore it, and how far its values are from those that were saved. Errors do
    not add up: each delta is made against what the chain gives back. Then the steps
    that its log of gradients has, also while a run goes on.

    \b
    Examples:
      ckpt log run.chain
      ckpt log run.chain --json
    """
    from pathlib import Path

    from ckpt_cli.views import report, segments
    from ckpt_cli.views.chain_log import lines, to_json
    from ckpt_formats.universal.chain import file as index

    found = index.read(Path(chain))
    logged = segments.open_all(Path(chain), found)
    if as_json:
        report.data(to_json(found, logged))
        return
    for line in lines(found, logged):
        click.echo(line)
