"""Options of `shadow`."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import CheckpointPath

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(dir_okay=False, readable=False)


@dataclass(frozen=True)
class ShadowOptions:
    """How long the shadow follows, and what it writes."""

    once: bool
    output: str | None
    base_every: int | None
    listen: str | None
    tls_certificate: str | None
    tls_key: str | None
    token: bytes | None = None
    """What readers must know, from the environment."""


def shadow_options(command: F) -> F:
    """The options of `shadow`; the command gets them as one `ShadowOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        names = (field.name for field in fields(ShadowOptions) if field.name != "token")
        options = ShadowOptions(**{name: arguments.pop(name) for name in names})
        if options.output is not None and not options.once:
            raise click.UsageError("--output needs --once: without it, the shadow does not end.")
        if options.listen is not None and options.once:
            raise click.UsageError("--listen and --once exclude each other: with --once, the shadow ends.")
        if (options.tls_certificate is None) != (options.tls_key is None):
            raise click.UsageError("--tls-certificate and --tls-key belong together.")
        if options.listen is not None:
            from ckpt_cli.reading import shadow_token

            options = replace(options, token=shadow_token())
        return command(*args, options=options, **arguments)

    listening = with_options(
        wrapper,
        click.option(
            "--listen",
            metavar="[HOST:]PORT",
            help="Let `ckpt restore tcp://HOST:PORT` and other commands read the state. HOST is localhost unless "
            "given; another one needs a token and TLS.",
        ),
        click.option("--tls-certificate", type=_FILE, metavar="FILE", help="The certificate (PEM) of the listener."),
        click.option("--tls-key", type=_FILE, metavar="FILE", help="Its private key (PEM)."),
        group="Listening",
    )
    return cast(
        F,
        with_options(
            listening,
            click.option("--once", is_flag=True, help="Go to the last step that all ranks have now, and end there."),
            click.option(
                "-o", "--output", type=CheckpointPath(), metavar="OUT", help="With --once: write the state there."
            ),
            click.option(
                "--base-every",
                type=click.IntRange(1),
                metavar="N",
                help="Add a base to CHAIN at the first step, N or more steps after the last base, of which the run "
                "recorded a fingerprint. It is compared with that first.",
            ),
            group="Work",
        ),
    )
