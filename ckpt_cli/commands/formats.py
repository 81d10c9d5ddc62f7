"""`ckpt formats`: what is read and written."""

from ckpt_cli.options.command import command


@command("formats")
def formats(as_json: bool) -> None:
    from ckpt_cli.views.formats import show_formats

    show_formats(as_json)
