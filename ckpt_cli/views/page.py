"""Pages that commands write for a browser: one file each, which needs no network and no server.

Their parts are in the folder `web`: one base template and one style sheet for all pages, and scripts that several
pages share. All values are in one JSON object, escaped so that no part of it can be read as HTML; the script shows
them as text, never as markup. A page's policy forbids every request, and every script and style except these two,
which it names by their hashes.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_cli.views.files import write_file
from ckpt_cli.views.report import say
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.locking import check_folder_of
from ckpt_formats.core.text import printable

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from jinja2 import Environment

_SHARED = ("elements", "numbers", "tip")
"""The scripts of every page."""


def page(
    command: str, scripts: Sequence[str], facts: Mapping[str, Any], own: Path | None = None, template: str | None = None
) -> str:
    """A page, of ASCII characters only. Equal facts give equal pages.

    Args:
        command: The command that writes it.
        scripts: The names of its scripts without `.js`, in their order, after those of every page.
        facts: What the scripts show.
        own: A folder with the template, with scripts, and with a style sheet of its own, `COMMAND.css`.
        template: The name of its template without `.html`; without one, that of the command.
    """
    from markupsafe import Markup

    folders: list[Traversable] = [files(__package__).joinpath("web"), *([] if own is None else [own])]
    style = _resource(folders, "page.css") + ("" if own is None else _resource(folders, f"{command}.css"))
    body = "\n".join(_resource(folders, f"{name}.js") for name in (*_SHARED, *scripts))
    script = f'"use strict";\n(() => {{\n{body}}})();\n'
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    # These are no text: our own files and their hashes, and JSON in which nothing has a meaning in HTML.
    parts = {"policy": policy, "style": style, "script": script, "facts": _inert(facts)}
    inert = {name: Markup(part) for name, part in parts.items()}
    return _environment(folders).get_template(f"{template or command}.html").render(command=command, **inert)


def _environment(folders: "Sequence[Traversable]") -> "Environment":
    """The templates of some folders. Every value is escaped, and a name that is not given is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # only a run that writes a page needs it

    return Environment(
        loader=FunctionLoader(lambda name: _resource(folders, name)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _resource(folders: "Sequence[Traversable]", name: str) -> str:
    """The content of a file in the first of these folders that has it."""
    return next(folder for folder in folders if folder.joinpath(name).is_file()).joinpath(name).read_text("ascii")


def check_place(target: Path, command: str) -> None:
    """Raise `OutputError` if the page cannot be written; called before anything is computed.

    A file that starts as every page of the command does may be replaced.
    """
    check_folder_of(target, "page")
    if os.path.lexists(target) and not _is_page(target, command):
        hint = "Choose another name, or remove it first."
        raise OutputError(f"a file exists here that is not a page of `ckpt {command}`", where=target, hint=hint)


def write(content: str, target: Path, command: str) -> None:
    """Write the page completely or not at all, and print where it is. Raises `OutputError`, `NoSpaceError`."""
    write_file(content.encode("ascii"), target, lambda: check_place(target, command))
    say(f"page: {printable(str(target))}")


def _is_page(path: Path, command: str) -> bool:
    sign = f"<!doctype html>\n<!-- Made by ckpt {command}. -->\n".encode()
    try:
        with path.open("rb") as file:
            return path.is_file() and file.read(len(sign)) == sign
    except OSError:
        return False


def _hash(text: str) -> str:
    """The source expression of a policy for a script or style: its SHA-256 hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(fields: Mapping[str, Any]) -> str:
    """JSON without characters that have a meaning in HTML."""
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
