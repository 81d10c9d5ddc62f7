"""The page that `diff --html` writes."""

from typing import Any

from ckpt.compare.pairs import Diff
from ckpt.compare.to_json import facts, totals
from ckpt_cli.views.page import page
from ckpt_formats.core.checkpoint import Checkpoint

_SCRIPTS = ("listing", "diff", "head", "cells", "map", "histograms", "values", "table", "start")
_DRAWN = {
    "cells": ("layer", "role", "state"),
    "layers": ("layer", "state"),
    "roles": ("role", "state"),
    "states": ("state",),
}
"""The groups by their names in the page's script."""


def page_of(first: Checkpoint, second: Checkpoint, diff: Diff) -> str:
    """The page, of ASCII characters only. Equal differences give equal pages."""
    return page("diff", _SCRIPTS, page_facts(first, second, diff))


def page_facts(first: Checkpoint, second: Checkpoint, diff: Diff) -> dict[str, Any]:
    """The fields of `--json`, and the groups that the page draws. Single tensors have no histogram."""
    fields = facts(first, second, diff)
    for row in fields["tensors"]:
        del row["histogram"]
    return fields | {name: totals(diff, by) for name, by in _DRAWN.items()}
