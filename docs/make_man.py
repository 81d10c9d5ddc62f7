"""Writes the man pages from the commands' own help into docs/man, or into the folder that is named.

A wheel puts them into share/man/man1, where `man ckpt` finds them if the environment is on PATH. Git has none of them.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
# The build of a wheel runs this where ckpt is not installed.
sys.path[:0] = [str(ROOT), str(ROOT / "formats"), str(ROOT / "codecs")]
from ckpt_cli.main import COMMANDS, EXIT_STATUS, cli  # noqa: E402

FOLDER = ROOT / "docs" / "man"
_BLOCK = "\b"
"""A paragraph that begins with this character keeps its lines."""


def pages() -> dict[str, str]:
    """All pages by file name."""
    root = click.Context(cli, info_name="ckpt", **cli.context_settings)
    made = {"ckpt.1": "\n".join(_page(root, cli)) + "\n"}
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        made[f"ckpt-{name}.1"] = "\n".join(_page(context, command)) + "\n"
    return made


def _page(context: click.Context, command: click.Command) -> Iterator[str]:
    title = context.command_path.replace(" ", "-")
    short, *paragraphs = re.split(r"\n\s*\n", (command.help or "").strip())
    yield f'.TH "{title.upper()}" "1" "" "ckpt" "User commands"'
    yield from (".SH NAME", f"{_plain(title)} \\- {_plain(' '.join(short.split()).rstrip('.'))}")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (".SH SYNOPSIS", f"\\fB{_plain(context.command_path)}\\fR {_plain(usage)}")
    described = [paragraph for paragraph in paragraphs if "Exit codes:" not in paragraph]
    if described:
        yield ".SH DESCRIPTION"
    for paragraph in described:
        yield from _paragraph(paragraph)
    for heading, options in _groups(context, command).items():
        yield f".SH {_plain(heading.upper())}"
        for flags, text in options:
            yield from (".TP", f"\\fB{_plain(flags)}\\fR", _plain(text))
    if command is cli:
        yield ".SH COMMANDS"
        for name in COMMANDS:
            own = cli.get_command(context, name)
            assert own is not None
            yield from (".TP", f"\\fBckpt\\-{_plain(name)}\\fR(1)", _plain(own.get_short_help_str(200)))
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_STATUS.items():
        yield from (".TP", f"\\fB{code}\\fR", _plain(meaning))
    others = ["ckpt"] if command is not cli else [f"ckpt-{name}" for name in COMMANDS]
    yield from (".SH SEE ALSO", ", ".join(f"\\fB{_plain(name)}\\fR(1)" for name in others))


def _paragraph(text: str) -> Iterator[str]:
    lines = text.strip("\n").splitlines()
    if lines[0].strip() != _BLOCK:
        yield from (".PP", _plain(" ".join(text.split())))
        return
    heading, *rest = lines[1:]
    yield from (".PP", _plain(heading.strip()), ".PP", ".RS 2", ".nf")
    yield from (_plain(line.strip()) for line in rest)
    yield from (".fi", ".RE")


def _groups(context: click.Context, command: click.Command) -> dict[str, list[tuple[str, str]]]:
    """The options by the heading under which `--help` shows them; those without one last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
    return dict(sorted(groups.items(), key=lambda item: item[0] == "Options"))


def _plain(text: str) -> str:
    """Text that roff shows as it is: no request, no escape, and hyphens that can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    made = pages()
    for path in folder.glob("*.1"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
