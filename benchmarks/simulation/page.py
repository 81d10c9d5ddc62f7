"""The page of `simulate_training.py --html`: curves over the time between failures, tables, and the sources.

It has the frame and the scripts of the pages of `ckpt`: one file, no network, light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.views.page import page

_WEB = Path(__file__).with_name("web")


def page_of(facts: Mapping[str, Any]) -> str:
    """The page, of ASCII characters only. `facts`: those of `--json`, with `curves`."""
    return page("simulate_training", ("charts", "simulation"), facts, _WEB)
