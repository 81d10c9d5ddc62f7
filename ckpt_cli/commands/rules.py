"""`ckpt rules`: how each parameter is cut over ranks, and which rule says so."""

import click

from ckpt_cli.options import Place, PlacesCommand, Reading, as_json, common, reading


@click.command(cls=PlacesCommand)
@click.argument("path", type=Place())
@reading
@as_json
@common
def rules(path: str, reading: Reading, as_json: bool) -> None:
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
