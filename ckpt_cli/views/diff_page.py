"""The page that `diff --html` writes: one file, which needs no network and no server.

Its parts are in the folder `web`. All values of the checkpoints are in one JSON object, escaped so that no part of it
can be read as HTML; the script shows them as text, never as markup. The page's policy forbids every request, and every
script and style except these two, which it names by their hashes.
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
"""The groups by their names in the page's script."""
_SIGN = b"<!doctype html>\n<!-- Made by ckpt diff. -->\n"
"""The first bytes of every page. A file that starts with them may be replaced by a later page."""


def check_place(target: Path) -> None:
    """Raise `OutputError` if the page cannot be written; called before anything is compared."""
    if not target.parent.is_dir():
        where, hint = target.parent, "Create it first."
        raise OutputError("the folder that should hold the page does not exist", where=where, hint=hint)
    if os.path.lexists(target) and not _is_page(target):
        hint = "Choose another name, or remove it first."
        raise OutputError("a file exists here that is not a page of `ckpt diff`", where=target, hint=hint)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError("no permission to write here", where=target.parent, hint="Choose another folder.")


def page_of(first: Checkpoint, second: Checkpoint, diff: Diff) -> str:
    """The page, of ASCII characters only. Equal differences give equal pages."""
    style = _resource("page.css")
    body = "\n".join(_resource(f"{name}.js") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{body}}})();\n'
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = {"policy": policy, "style": style, "script": script, "facts": _inert(page_facts(first, second, diff))}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))


def page_facts(first: Checkpoint, second: Checkpoint, diff: Diff) -> dict[str, Any]:
    """The fields of `--json`, and the groups that the page draws. Single tensors have no histogram."""
    fields = facts(first, second, diff)
    for row in fields["tensors"]:
        del row["histogram"]
    return fields | {name: totals(diff, by) for name, by in _DRAWN.items()}


def write(page: str, target: Path) -> None:
    """Write the page completely or not at all. Raises `OutputError`, `NoSpace`."""
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
    """The source expression of a policy for a script or style: its SHA-256 hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(fields: dict[str, Any]) -> str:
    """JSON without characters that have a meaning in HTML."""
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
