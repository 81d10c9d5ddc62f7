"""The page that `inspect --html` writes: what a checkpoint is, and what takes space in it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt import sizes
from ckpt_cli.views.inspect import columns_of_files
from ckpt_cli.views.page import check_place, page, write
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.state_table import ROLES, StateTable
from ckpt_formats.core.values import brief
from ckpt_formats.registry.location import format_name

_SCRIPTS = ("charts", "listing", "tree", "inspect")
_MAX_VALUE = 1000
"""Characters of an extra that the page shows."""


def write_page(checkpoint: Checkpoint, target: Path) -> None:
    """Write the page of a checkpoint. Raises `OutputError`."""
    check_place(target, "inspect")
    write(page_of(checkpoint), target, "inspect")


def page_of(checkpoint: Checkpoint) -> str:
    """The page, of ASCII characters only. Equal indexes give equal pages."""
    return page("inspect", _SCRIPTS, page_facts(checkpoint))


def page_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the page shows. A tensor has the number of its form: parameters of the same role and states share one."""
    origin, states = checkpoint.origin, sizes.table(checkpoint)
    columns = columns_of_files(checkpoint)
    forms, tensors = _forms(states)
    return {
        "path": str(checkpoint.path),
        "format": format_name(checkpoint),
        "engine": origin.engine,
        "version": origin.version,
        "step": origin.step,
        "layout": [[key, brief(value)] for key, value in origin.layout.items() if value is not None],
        "approximate": len(checkpoint.errors),
        "coded": states.uses_codecs(),
        "sizes": [row.to_json() for row in sizes.rows_of(states)],
        "forms": forms,
        "tensors": tensors,
        "files": [
            {
                "file": file.path.name,
                "rank": _ranks(file.rank),
                "role": file.role,
                "nbytes": file.nbytes,
                "columns": columns.get(file.path, ""),
            }
            for file in checkpoint.files
        ],
        "groups": [
            {
                "options": brief({key: value for key, value in group.options.items() if value is not None}, _MAX_VALUE),
                "parameters": len(group.names),
            }
            for group in checkpoint.groups
        ],
        "aliases": list(checkpoint.aliases.items()),
        "extras": [[key, brief(value, _MAX_VALUE)] for key, value in checkpoint.extras.items()],
        "notices": [str(notice) for notice in checkpoint.notices],
    }


def _forms(states: StateTable) -> tuple[list[dict[str, Any]], list[tuple[str, int, int, int]]]:
    """The forms of parameters, and for each parameter: name, number of its form, stored bytes, blocks."""
    forms: dict[str, int] = {}
    numbers: list[int] = []
    stored, tensors = states.of_parameters(states.coding.nbytes), []
    for form, number in states.forms():
        first, end = int(states.first[number]), int(states.first[number + 1])
        if form == len(numbers):  # forms of the table may also differ in plain values
            role, weight = ROLES[int(states.role[number])], int(states.weight[number]) - first
            text = json.dumps({"role": role, "weight": weight, "states": list(_states(states, first, end))})
            numbers.append(forms.setdefault(text, len(forms)))
        blocks = int(states.fragments[first:end].max())
        tensors.append((states.names[number], numbers[form], int(stored[number]), blocks))
    return [json.loads(text) for text in forms], tensors


def _states(states: StateTable, first: int, end: int) -> Iterator[dict[str, Any]]:
    for row in range(first, end):
        yield {
            "state": states.states[int(states.state[row])],
            "dtype": states.dtypes[int(states.dtype[row])].name,
            "shape": states.shape(row),
            "nbytes": int(states.nbytes[row]),
        }


def _ranks(rank: Mapping[str, int]) -> str:
    return " ".join(f"{axis} {number}" for axis, number in rank.items())
