"""`ckpt completion`: the script by which a shell completes commands, options and paths."""

import click

from ckpt_cli.options.command import command


@command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str, as_json: bool) -> None:
    from ckpt_cli.views.completion import show_completion

    show_completion(shell, as_json)
