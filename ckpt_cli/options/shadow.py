"""Options of `shadow`, `serve` and `hold`."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.param_type import ParamType
from ckpt_cli.options.types import CheckpointPath, FileToRead, SizeType, numbers
from ckpt_formats.core.arguments import Positive

if TYPE_CHECKING:
    from ckpt_formats.stores.http_client import Credentials

F = TypeVar("F", bound=Callable[..., Any])

_URLS = ("http://", "https://")
"""How the URL of a chain that is served begins."""
_FILE = FileToRead()


@dataclass(frozen=True)
class ListenOptions:
    """Where a command listens, and whom it lets in."""

    listen: str | None
    tls_certificate: str | None
    tls_key: str | None
    token: bytes | None = None
    """What readers must know, from the environment."""


@dataclass(frozen=True)
class HoldOptions:
    """How much a holder may hold and where it listens; or what other holders are asked for."""

    memory: int | None
    status: str | None
    """The address of the one whose status is shown."""
    free: str | None
    """The address of a run that is freed."""
    listening: ListenOptions


@dataclass(frozen=True)
class ShadowOptions:
    """What the shadow holds, how long it follows, and what it writes."""

    once: bool
    output: str | None
    base_every: int | None
    part: tuple[int, int] | None
    mirror: str | None
    listening: ListenOptions
    credentials: "Credentials | None" = None
    """How to be let in where the log is served; None: the chain is a folder."""


class PartType(ParamType[tuple[int, int]]):
    """`i/N`: which part of how many."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        number, slash, count = str(value).partition("/")
        digits = number.isascii() and number.isdigit() and count.isascii() and count.isdigit()
        if not slash or not digits or len(value) > 12 or not 1 <= int(number) <= int(count):
            self.fail(f"{value!r:.40} is not a part: write i/N, such as 1/4.", param, ctx)
        return int(number), int(count)


def shadow_options(command: F) -> F:
    """The options of `shadow`; the command gets them as one `ShadowOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        listening = _listening(arguments)
        names = (field.name for field in fields(ShadowOptions) if field.name not in ("listening", "credentials"))
        options = ShadowOptions(**{name: arguments.pop(name) for name in names}, listening=listening)
        if options.output is not None and not options.once:
            raise click.UsageError("--output needs --once: without it, the shadow does not end.")
        if options.output is not None and options.part is not None:
            raise click.UsageError("--output and --part exclude each other: a part is not a checkpoint.")
        if listening.listen is not None and options.once:
            raise click.UsageError("--listen and --once exclude each other: with --once, the shadow ends.")
        if arguments["chain"].startswith(_URLS):
            from ckpt_cli.reading import shadow_credentials

            options = replace(options, credentials=shadow_credentials())
        elif options.mirror is not None:
            raise click.UsageError("--mirror is for a CHAIN that is served: https://HOST[:PORT]/NAME.")
        return command(*args, options=options, **arguments)

    listening = _listening_options(
        wrapper,
        "Let `ckpt restore tcp://HOST:PORT` and other commands read the state. HOST is localhost unless given; "
        "another one needs a token and TLS.",
        required=False,
    )
    return cast(
        F,
        with_options(
            listening,
            click.option(
                "--part",
                type=PartType(),
                metavar="i/N",
                help="Hold part i of N of the state. Read with `ckpt restore tcp://HOST:PORT,tcp://HOST:PORT`, which "
                "names the shadows of all parts.",
            ),
            click.option(
                "--mirror",
                type=CheckpointPath(),
                metavar="DIR",
                help="If CHAIN is a URL: where the bytes of the log are kept until they are applied. The folder "
                "of temporary files unless given.",
            ),
            click.option("--once", is_flag=True, help="Go to the last step that all ranks have now, and end there."),
            click.option(
                "-o", "--output", type=CheckpointPath(), metavar="OUT", help="With --once: write the state there."
            ),
            click.option(
                "--base-every",
                type=numbers(Positive),
                metavar="N",
                help="Add a base to CHAIN when N steps have passed since the last one, at the next step with a "
                "fingerprint of the run, after comparing both.",
            ),
            group="Work",
        ),
    )


def hold_options(command: F) -> F:
    """The options of `hold`; the command gets them as `HoldOptions`."""

    @wraps(command)
    def wrapper(*args: Any, memory: int | None, status: str | None, free: str | None, **arguments: Any) -> Any:
        listening = _listening(arguments)
        options = HoldOptions(memory, status, free, listening)
        holds = memory is not None and listening.listen is not None
        if holds + (status is not None) + (free is not None) != 1:
            raise click.UsageError("hold needs --memory and --listen, or only --status, or only --free.")
        return command(*args, options=options, **arguments)

    listening = _listening_options(
        cast(F, wrapper),
        "Where senders and readers find the holder. HOST is localhost unless given; another one needs a token and TLS.",
        required=False,
    )
    return cast(
        F,
        with_options(
            listening,
            click.option("--memory", type=SizeType(), metavar="SIZE", help="The most memory that pieces may take."),
            click.option("--status", metavar="HOST:PORT", help="Show what the holder at this address has, and end."),
            click.option(
                "--free",
                metavar="peers://HOST:PORT,.../RUN",
                help="Free all that these holders have of a run that has ended, and end. Nothing in files changes.",
            ),
            group="Work",
        ),
    )


def serve_options(command: F) -> F:
    """The options of `serve`; the command gets them as `ListenOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        return command(*args, options=_listening(arguments), **arguments)

    return _listening_options(
        cast(F, wrapper),
        "Where readers find the chain. HOST is localhost unless given; another one needs a token and TLS.",
        required=True,
    )


def _listening_options(command: F, text: str, required: bool) -> F:
    return cast(
        F,
        with_options(
            command,
            click.option("--listen", metavar="[HOST:]PORT", required=required, help=text),
            click.option(
                "--tls-certificate", type=_FILE, metavar="FILE", help="The certificate (PEM) of the listener."
            ),
            click.option("--tls-key", type=_FILE, metavar="FILE", help="Its private key (PEM)."),
            group="Listening",
        ),
    )


def _listening(arguments: dict[str, Any]) -> ListenOptions:
    names = (field.name for field in fields(ListenOptions) if field.name != "token")
    options = ListenOptions(**{name: arguments.pop(name) for name in names})
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key belong together.")
    if options.listen is not None:
        from ckpt_cli.reading import shadow_credentials

        options = replace(options, token=shadow_credentials().token)
    return options
