"""`ckpt formats`: what is read and written, and whose names are known."""

import click

from ckpt_cli.options.command import command


@command("formats")
@click.option("--families", is_flag=True, help="Show the families of models whose names ckpt translates.")
def formats(families: bool, as_json: bool) -> None:
    from ckpt_cli.views.formats import show_families, show_formats

    (show_families if families else show_formats)(as_json)
