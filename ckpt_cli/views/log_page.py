"""The page that `log --html` writes: size and error of the states of a chain, by step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.views.page import page

_SCRIPTS = ("charts", "listing", "log")


def page_of(run: Path, fields: Mapping[str, Any]) -> str:
    """The page, of ASCII characters only. `fields`: those of `--json`. Equal chains give equal pages."""
    return page("log", _SCRIPTS, {"chain": str(run), **fields})
