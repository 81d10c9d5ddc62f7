"""`ckpt rules`: the rule of each parameter; equal rules of all layers are one line."""

import re
from dataclasses import dataclass
from typing import Any

import click

from ckpt.opening import effective_layout
from ckpt_cli import notes
from ckpt_cli.views import report
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.text import printable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class RuleRow:
    """A parameter and its rule, if it has one."""

    parameter: Parameter
    rule: Rule | None

    @property
    def title(self) -> str:
        """The name, with `*` for numbers of layers."""
        return _NUMBER.sub("*", self.parameter.name)

    @property
    def how(self) -> str:
        return "no rule" if self.rule is None else str(self.rule)

    @property
    def why(self) -> str:
        return "" if self.rule is None else f"{self.rule.origin}: {self.rule.pattern}"


def rows(checkpoint: Checkpoint, layout: Layout) -> list[RuleRow]:
    """All parameters of the model. Raises `RulesError` for a rule whose formulas have no numbers."""
    model = (parameter for parameter in checkpoint.parameters.values() if parameter.role != "extra")
    return [RuleRow(one, layout.rule(one.name) if layout.matching(one.name) else None) for one in model]


def show_rules(checkpoint: Checkpoint, as_json: bool) -> None:
    """Print the table, and a note about parameters without a rule."""
    layout = effective_layout(checkpoint, click.get_current_context().meta["ckpt.rules"])
    table = rows(checkpoint, layout)
    without = [row.parameter.name for row in table if row.rule is None]
    if as_json:
        report.data({"path": str(checkpoint.path), "sizes": dict(layout.sizes), "parameters": list(map(_json, table))})
        return
    folded: dict[tuple[str, str, str], int] = {}
    for row in table:
        key = (row.title, row.how, row.why)
        folded[key] = folded.get(key, 0) + 1
    for (title, how, why), count in folded.items():
        click.echo(f"{printable(title)}{f' ({count})' if count > 1 else ''}\n    {printable(how)}")
        if why:
            click.echo(f"    by {printable(why)}")
    if without:
        first = printable(re.escape(without[0]))
        notes.note(
            f"{len(without)} parameters have no rule; over several ranks each needs one, for example:  "
            f"[[rule]]  match = '{first}'  axis = 0"
        )


def _json(row: RuleRow) -> dict[str, Any]:
    rule = row.rule
    shown = None if rule is None else {"how": str(rule), "match": rule.pattern, "origin": rule.origin}
    return {"name": row.parameter.name, "shape": list(row.parameter.weight.shape), "rule": shown}
