"""`ckpt rules`: how each parameter is cut over ranks, and which rule says so."""

import click

from ckpt_cli.options import CheckpointPath, PathsCommand, SourceOptions, as_json, common, reading


@click.command(cls=PathsCommand)
@click.argument("path", type=CheckpointPath())
@reading
@as_json
@common
def rules(path: str, reading: SourceOptions, as_json: bool) -> None:
    """Show which rule each parameter of the checkpoint at PATH got, and why.

    A rule comes from your file (--rules), from the checkpoint, or from a set that
    comes with ckpt; the first that matches the name counts. Only headers are read.

    \b
    Examples:
      ckpt rules run/iter_0001000
      ckpt rules run/iter_0001000 --rules mine.toml
      ckpt rules run --json | jq '.parameters[] | select(.rule == null)'
    """
    from ckpt_cli import notes, work
    from ckpt_cli.views import rules as rule_table

    checkpoint = work.open_source(path, reading)
    notes.note(*checkpoint.notices)
    rule_table.show_rules(checkpoint, work.layout_of(checkpoint, reading), as_json)
