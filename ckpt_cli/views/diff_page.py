"""The page that `diff --html` writes: one file that needs nothing else, neither network nor server.

Its parts are in the folder `web`. All that is said of the checkpoints goes in as one
piece of JSON, in which nothing can be taken for HTML; the script makes text of it and
never markup. The page's own policy forbids every request, and every script and style
but these two, which it names by their hashes.
"""

import base64
import hashlib
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from ckpt.compare.pairs import Diff
from ckpt.compare.to_json import facts, totals
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import NoSpace, OutputError
from ckpt_formats.core.locking import FULL
from ckpt_formats.core.text import PARTIAL

_SCRIPTS = ("facts", "elements", "numbers", "head", "cells", "map", "tip", "histograms", "values", "table", "start")
_DRAWN = {
    "cells": ("layer", "role", "state"),
    "layers": ("layer", "state"),
    "roles": ("role", "state"),
    "states": ("state",),
}
"""Groups by what they are called in the page's script."""
_SIGN = b"<!doctype html>\n<!-- Made by ckpt diff. -->\n"
"""Begins every page, so that a later one may take its place."""


def check_place(target: Path) -> None:
    """Refuse what cannot be written, before anything is compared. Raises `OutputError`."""
    if not target.parent.is_dir():
        where, hint = target.parent, "Create it first."
        raise OutputError("the folder that should hold the page does not exist", where=where, hint=hint)
    if os.path.lexists(target) and not _is_page(target):
        hint = "Choose another name, or remove it first."
        raise OutputError("there is something else than a page of `ckpt diff`", where=target, hint=hint)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError("no permission to write here", where=target.parent, hint="Choose another folder.")


def page_of(first: Checkpoint, second: Checkpoint, diff: Diff) -> str:
    """The page, of ASCII characters only. The same differences make the same page."""
    style = _resource("page.css")
    body = "\n".join(_resource(f"{name}.js") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{body}}})();\n'
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = {"policy": policy, "style": style, "script": script, "facts": _inert(page_facts(first, second, diff))}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))


def page_facts(first: Checkpoint, second: Checkpoint, diff: Diff) -> dict[str, Any]:
    """What `--json` says, and the groups of which there are pictures. Of single tensors none shows a histogram."""
    fields = facts(first, second, diff)
    for row in fields["tensors"]:
        del row["histogram"]
    return fields | {name: totals(diff, by) for name, by in _DRAWN.items()}


def write(page: str, target: Path) -> None:
    """Put the page where it belongs, whole or not at all. Raises `OutputError`, `NoSpace`."""
    draft = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    try:
        try:
            with draft.open("x", encoding="ascii", newline="\n") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            check_place(target)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        kind = NoSpace if error.errno in FULL else OutputError
        raise kind(f"cannot be written: {error.strerror or error}", where=target) from error


def _is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.is_file() and file.read(len(_SIGN)) == _SIGN
    except OSError:
        return False


def _resource(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text("ascii")


def _hash(text: str) -> str:
    """How a policy names a script or style by what it says."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(fields: dict[str, Any]) -> str:
    """JSON that no parser of HTML sees anything in."""
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
