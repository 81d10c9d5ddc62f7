"""The completion scripts, which are Click's own."""

import click
from click.shell_completion import get_completion_class

from ckpt_cli.views.report import data

VARIABLE = "_CKPT_COMPLETE"
"""The variable by which the script asks `ckpt` for completions."""


def show_completion(shell: str, as_json: bool) -> None:
    """Print the script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    complete = kind(click.Command("ckpt"), {}, "ckpt", VARIABLE)
    script = complete.source_template % complete.source_vars()  # `source` also starts the shell, to see how old it is
    # Click's script for fish would end a description at its first comma.
    script = script.replace('string split ","', 'string split --max 1 ","')
    if as_json:
        data({"shell": shell, "script": script})
    else:
        click.echo(script)
