"""Writes docs/cli.md from the commands' own --help; with --check, fails if it is not what they say."""

import sys
from pathlib import Path

import click

from ckpt_cli.main import COMMANDS, cli

PAGE = Path(__file__).with_name("cli.md")


def page() -> str:
    parts = ["# Commands\n\nMade from `--help` by `python docs/make_cli.py`; do not edit.\n"]
    parts += [f"## ckpt {name}".rstrip() + f"\n\n```text\n{_help(name)}\n```\n" for name in ("", *COMMANDS)]
    return "\n".join(parts)


def _help(name: str) -> str:
    root = click.Context(cli, info_name="ckpt", **cli.context_settings, max_content_width=100, terminal_width=100)
    if not name:
        return cli.get_help(root)
    command = cli.get_command(root, name)
    assert command is not None
    return command.get_help(
        click.Context(command, info_name=name, parent=root, terminal_width=100, max_content_width=100)
    )


def main() -> int:
    made = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, "utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text("utf-8") != made:
        print("docs/cli.md is not what --help says: run `python docs/make_cli.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
