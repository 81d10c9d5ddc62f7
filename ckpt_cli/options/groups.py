"""Groups of options: each has a heading of its own in `--help`, and may reach its command as one object."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

import click

T = TypeVar("T")

_HEADING = "Options"
"""The heading of options without a group. They come last."""


def with_options(command: Callable[..., Any], *options: Callable[[Any], Any], group: str = _HEADING) -> Any:
    """The command with more options, in this order and before those that it has, in one group of `--help`."""
    decorated: Any = command
    for option in reversed(options):
        decorated = option(decorated)
        decorated.__click_params__[-1].group = group
    return decorated


def take_options(kind: type[T], arguments: dict[str, Any]) -> T:
    """Take the fields of a dataclass out of the arguments of a command, and return an object of it."""
    return kind(**{field.name: arguments.pop(field.name) for field in fields(cast(Any, kind))})


class TerminalContext(click.Context):
    """A context whose help is as wide as the terminal; 100 columns if there is none."""

    def make_formatter(self) -> click.HelpFormatter:
        if self.terminal_width is None:
            import shutil  # only help needs it

            self.terminal_width = self.max_content_width = shutil.get_terminal_size((100, 24)).columns
        return super().make_formatter()


class GroupedCommand(click.Command):
    """A command whose `--help` shows its options in groups."""

    context_class = TerminalContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", _HEADING), []).append(record)
        for group in sorted(groups, key=_HEADING.__eq__):
            with formatter.section(group):
                formatter.write_dl(groups[group])
