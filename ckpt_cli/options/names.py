"""The names under which a command compares checkpoints of one model that different libraries wrote."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.source import NAMINGS, allow_rounding
from ckpt_cli.options.types import NamedPath

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint
    from ckpt_formats.core.errors import CkptError
    from ckpt_formats.core.format import Naming

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--names",
        type=click.Choice(NAMINGS),
        help="Compare under these names: translate each checkpoint that has others, with its optimizer states.",
    ),
    click.option(
        "--config",
        type=NamedPath(readable=False),
        help="With --names: config.json, or the folder with it.  [default: that of each checkpoint, else of another]",
    ),
    allow_rounding,
)


def named_alike(command: F) -> F:
    """`--names`, `--config` and `--allow-rounding`; the command gets the checkpoints under these names.

    Of more than two, those after the first that cannot have the names are left out, with their errors in `unread`.
    """

    @wraps(command)
    def wrapper(
        *args: Any,
        checkpoints: "tuple[Checkpoint, ...]",
        names: "Naming | None",
        config: str | None,
        allow_rounding: bool,
        **arguments: Any,
    ) -> Any:
        if names is not None:
            if arguments.get("delta") is not None:
                raise click.UsageError("-o writes SECOND under its own names: give no --names, or convert it first.")
            checkpoints, errors = _translated(checkpoints, names, config, allow_rounding, arguments["unread"])
            arguments["unread"] = {**arguments["unread"], **errors}
        elif config is not None or allow_rounding:
            option = "--config" if config is not None else "--allow-rounding"
            raise click.UsageError(f"{option} is about the translation of names: give --names, too.")
        return command(*args, checkpoints=checkpoints, **arguments)

    return cast(F, with_options(wrapper, *_OPTIONS, group="Names"))


def _translated(
    checkpoints: "Sequence[Checkpoint]",
    naming: "Naming",
    config: str | None,
    allow_rounding: bool,
    unread: "Mapping[str, CkptError]",
) -> "tuple[tuple[Checkpoint, ...], dict[str, CkptError]]":
    """The checkpoints under the names of one library, and by path the errors of those that cannot have them. The
    model's configuration comes with one of them, or from the user; only those that it came with have it among their
    extras.

    Raises the error of the first, that of any of two, and that of another if no other can have these names.
    """
    from dataclasses import replace

    from ckpt.rename import use_names
    from ckpt_cli import reading
    from ckpt_formats.core.checkpoint import opened_path
    from ckpt_formats.core.errors import CkptError
    from ckpt_formats.names.config import CONFIG
    from ckpt_formats.names.describe import config_of

    place = None if config is None else reading.source_place(config)
    known = None if place else next((one for one in checkpoints if config_of(one)), None)
    translated: list[Checkpoint] = []
    errors: dict[str, CkptError] = {}
    for checkpoint in checkpoints:
        source, has_own = checkpoint, config_of(checkpoint) is not None
        if not has_own and known is not None:
            source = replace(checkpoint, extras={**checkpoint.extras, CONFIG: known.extras[CONFIG]})
        try:
            renamed = reading.noted(use_names(source, naming, place, allow_rounding=allow_rounding))
        except CkptError as error:
            error.where = error.where or str(checkpoint.path)  # of several, which one
            if not translated or len(checkpoints) + len(unread) == 2:
                raise
            errors[str(opened_path(checkpoint))] = error
            continue
        if not has_own:
            renamed = replace(renamed, extras={key: value for key, value in renamed.extras.items() if key != CONFIG})
        translated.append(renamed)
    if errors and len(translated) == 1:
        raise next(iter(errors.values()))
    return tuple(translated), errors
