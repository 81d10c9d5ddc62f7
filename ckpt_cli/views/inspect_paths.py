"""What `ckpt inspect` shows of the paths that are given: one checkpoint, those of a run, or several."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ckpt_cli.options.source import Choice, listed, models_of, opening, with_checkpoints_inside
from ckpt_cli.views import inspect
from ckpt_formats.core.format import ReadOptions


@dataclass(frozen=True)
class Shown:
    """How a checkpoint is shown."""

    depth: int | None
    """Levels of the tree of names; None for all."""
    extras: bool
    """Whether extras are shown in full."""
    as_json: bool
    html: str | None
    """Where a page is written, too."""


def show(paths: Sequence[str], options: ReadOptions, choice: Choice, how: Shown) -> int:
    """Show a checkpoint, those in the folder of a run, or several. Returns the exit code."""
    target = None if how.html is None else Path(how.html)
    if len(paths) > 1:
        from ckpt_cli.views import checkpoints  # a single one needs no table

        return checkpoints.show_several(listed(paths, options, choice), how.as_json, target)
    place, inside = with_checkpoints_inside(paths[0])
    run = Path(place) if isinstance(place, str) else place
    if inside:
        if choice:
            raise click.UsageError("--only and --skip are about one checkpoint: name one of those in the folder.")
        from ckpt_cli.views import checkpoints

        checkpoints.show_run(run, inside, options, how.as_json, target)
        return 0
    if models := models_of(place):
        from ckpt_cli.views import checkpoints

        checkpoints.show_family(run, models, options, how.as_json, target)
        return 0
    checkpoint = choice.of(opening(place, options)())
    inspect.note_lack_of_index(checkpoint)
    if target is not None:
        from ckpt_cli.views.inspect_page import write_page

        write_page(checkpoint, target)
    if how.as_json:
        inspect.print_json(checkpoint, place)
    else:
        inspect.print_text(checkpoint, how.depth, how.extras)
    return 0
