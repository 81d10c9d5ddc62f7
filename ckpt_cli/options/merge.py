"""The models that `ckpt merge` reads, the method, and its settings."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.source import only, skip, source
from ckpt_cli.options.types import CheckpointPath, PatternType, WeightsType, numbers
from ckpt_formats.core.arguments import Count

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])

METHODS = ("linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties")
"""The methods of `ckpt.merge`, which is imported when the command runs."""
RESCALES = ("density", "l1", "none")
_SETTINGS = ("weights", "density", "t")

_OPTIONS = (
    click.option("--method", type=click.Choice(METHODS), required=True, help="How to merge."),
    click.option(
        "--base",
        type=CheckpointPath(),
        metavar="CKPT",
        help="The model from which all MODELs were tuned. Every method but linear and slerp needs it.",
    ),
    click.option(
        "--weights", type=WeightsType(), metavar="W,W,...", help="A weight for each MODEL.  [default: all are 1]"
    ),
    click.option(
        "--density",
        type=WeightsType(),
        metavar="D[,D...]",
        help="The share of each MODEL's differences that is kept: one number, or one for each MODEL.",
    ),
    click.option(
        "--t",
        type=WeightsType(),
        metavar="T[,T...]",
        help="For slerp: from 0, the first MODEL, to 1, the second. Several numbers are spread over the layers.",
    ),
    click.option(
        "--scale", type=float, default=1.0, show_default=True, metavar="X", help="Factor for the sum of differences."
    ),
    click.option(
        "--normalize/--no-normalize",
        default=None,
        help="Divide by the sum of weights.  [default: for linear and ties]",
    ),
    click.option(
        "--rescale",
        type=click.Choice(RESCALES),
        help="For DARE: what multiplies the elements that are kept.  [default: density, which is 1 / density]",
    ),
    click.option("--seed", type=numbers(Count), help="For DARE: another number keeps other elements.  [default: 0]"),
    click.option(
        "--where",
        type=(PatternType(), str),
        multiple=True,
        metavar="PATTERN SETTING",
        help="For tensors whose names match: a setting such as t=0.3, density=0.1 or weights=1,2. May be given again.",
    ),
)


def merged(command: F) -> F:
    """`MODEL...`, `--method` and its settings, `--only` and `--skip`; the command gets the merged model as `source`."""

    @wraps(command)
    def combined(
        *args: Any,
        models: "tuple[Checkpoint, ...]",
        base: "Checkpoint | None",
        method: Any,
        where: tuple[tuple[str, str], ...],
        only: tuple[str, ...],
        skip: tuple[str, ...],
        **arguments: Any,
    ) -> Any:
        from ckpt.combine import merge
        from ckpt_cli.reading import noted

        names = ("weights", "density", "t", "scale", "normalize", "rescale", "seed")
        settings = {name: arguments.pop(name) for name in names}
        selected = [one.select(only, skip) if only or skip else one for one in (*models, *([base] if base else []))]
        own_base = selected.pop() if base else None
        result = merge(selected, method, base=own_base, where=_settings_by_pattern(where), **settings)
        return command(*args, source=noted(result), **arguments)

    grouped = with_options(combined, *_OPTIONS, only, skip, group="Merge")
    return cast(F, source("models", several="MODEL...", option="base")(grouped))


def _settings_by_pattern(where: tuple[tuple[str, str], ...]) -> dict[str, dict[str, tuple[float, ...]]]:
    """The settings of `--where`; those of one pattern are joined. Raises `UsageError`."""
    settings: dict[str, dict[str, tuple[float, ...]]] = {}
    for pattern, text in where:
        name, mark, values = text.partition("=")
        if not mark or name not in _SETTINGS:
            raise click.UsageError(
                f"--where: {text!r:.60} is not a setting like t=0.3, weights=1,2 or density=0.1, after {pattern!r:.60}."
            )
        own = settings.setdefault(pattern, {})
        if name in own:
            raise click.UsageError(f"--where gives {name} twice for {pattern!r:.60}.")
        own[name] = WeightsType().convert(values, None, click.get_current_context())
    return settings
