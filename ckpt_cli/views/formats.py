"""The tables of formats and families: what is read, what is written, by what each is known; whose names are known."""

from dataclasses import asdict
from typing import Any

import click

from ckpt_cli import notes
from ckpt_cli.options.target import FORMAT_OPTIONS
from ckpt_cli.views import columns
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.format import Format, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import folded, printable
from ckpt_formats.registry import FORMATS, ONLY_READ, format_named
from ckpt_formats.registry.endings import ENDINGS
from ckpt_formats.registry.plugins import ignored, plugins


def show_formats(as_json: bool) -> None:
    """Print all formats, in the order in which they are tried: those of installed packages last."""
    rows = [_facts(name, format_named(name), name not in ONLY_READ) for name in FORMATS]
    for plugin in plugins().values():
        format = plugin.loaded()
        if isinstance(format, Notice):
            notes.note(format)
        else:
            rows.append(_facts(plugin.name, format, isinstance(format, WritableFormat), plugin.package))
    for notice in ignored():
        notes.note(notice)
    if as_json:
        data({"formats": rows})
        return
    for row in rows:
        known = (*row["marks"]["paths"], *row["marks"]["names"], *row["marks"]["files"])
        how = "read, write" if row["written"] else "read"
        click.echo(f"{row['name']:<20} {how:<12} {' '.join(row['endings'])}".rstrip())
        source = f"from the package {row['package']}" if row["package"] else f"recognised by {', '.join(known)}"
        for line in (f"    {row['summary']}", f"    {source}"):
            for part in folded(line, columns.width()):
                click.echo(part)
    click.echo()
    conclude("The ending of a target determines its format; a name without one is a folder in the universal format.")
    conclude("A state of a chain is run.chain@1234, run.chain@last or run.chain@last~10.")


def show_families(as_json: bool) -> None:
    """Print the families of models whose names are in tables, sorted by name."""
    # Imported only here: it loads the tables of many models.
    from ckpt_formats.names.overview import family_summaries

    families = family_summaries()
    if as_json:
        data({"families": [asdict(one) for one in families]})
        return
    for one in families:
        parts = ("experts" if one.has_experts else "", "multi-token prediction" if one.has_mtp else "")
        megatron = "Megatron core" if one.in_megatron else "not in Megatron core"
        click.echo(f"{one.name:<20} {', '.join((megatron, *filter(None, parts)))}")
        for line in (f"    {', '.join(one.architectures)}", f"    model_type {', '.join(one.model_types)}"):
            for part in folded(line, columns.width()):
                click.echo(part)
        click.echo(f"    names of {', '.join(one.libraries)}")
    click.echo()
    conclude("Models of other families are converted, too, under the names that they have.")


def _facts(name: str, format: Format, written: bool, package: str | None = None) -> dict[str, Any]:
    known = _marks(FORMATS[name].marks) if package is None else {"paths": [], "names": [], "files": []}
    return {
        "name": name,
        "read": True,
        "written": written,
        "endings": [ending for ending, format in ENDINGS.items() if format == name],
        "marks": known,
        "options": [option.flag for option in FORMAT_OPTIONS.values() if name in option.formats],
        "summary": format.summary if package is None else printable(format.summary),
        "package": package,
    }


def _marks(marks: Any) -> dict[str, list[str]]:
    """What is at a path of the format. A name that every folder may have says nothing."""
    return {
        "paths": list(marks.paths),
        "names": [pattern for pattern in marks.entries if pattern != "*"],
        "files": [pattern for pattern in marks.files if pattern not in marks.entries],
    }
