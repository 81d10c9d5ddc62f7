"""The options of formats on the command line are the fields of the formats; commands are short."""

import json
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import get_args

import click
import pytest

import ckpt as ckpt_library
from ckpt.combine.merge_settings import Method
from ckpt.combine.task_blob import Rescale
from ckpt_cli.main import COMMANDS, cli
from ckpt_cli.options.merge import METHODS, RESCALES
from ckpt_cli.options.target import FORMAT_OPTIONS
from ckpt_formats.core.arguments import Count, Decay, Range, annotations_of
from ckpt_formats.registry import FORMATS, ONLY_READ, writable
from damage import SAMPLES, ckpt

ROOT = Path(__file__).parents[2]
ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
WRITABLE = [name for name in FORMATS if name not in ONLY_READ]
MAX_LINES = 45

WITHOUT_OPTION = {
    "rules": "--rules, an option of the source",
    "codec": "`ckpt compress` has it",
    "level": "`ckpt compress` has it",
    "check": "`ckpt compress` has it",
    "content": "the id of a chain's state",
    "single_file": "follows from the name of the target",
    "original": "`ckpt decompress` sets it",
}
"""Fields of formats that have no option of `convert`, and why."""

SELECTING = {"only", "skip"}

VALUES = {"keys": "nested", "separator": ".", "stages": "0,1", "config": "config.json"}
VALUES |= {"outtype": "bf16", "shard_nbytes": "1G", "pack_nbytes": "1M", "chunk_nbytes": "1M", "file_nbytes": "1M"}


def fields_of(name: str) -> set[str]:
    return {field.name for field in fields(writable(name))}


@pytest.mark.parametrize("name", WRITABLE)
def test_the_options_of_a_format_are_its_fields(name: str) -> None:
    listed = {field for field, option in FORMAT_OPTIONS.items() if name in option.formats}
    assert listed == fields_of(name) - WITHOUT_OPTION.keys()


def test_numbers_have_the_ranges_of_the_library() -> None:
    of_fields = {
        (field, option.flag): dict(annotations_of(type(writable(name))))[field]
        for field, option in FORMAT_OPTIONS.items()
        for name in option.formats
    }
    commands = {
        name: cli.get_command(click.Context(cli), name) for name in ("convert", "append", "average", "merge", "compact")
    }
    others = {
        ("convert", "--workers"): dict(annotations_of(ckpt_library.Resources))["workers"],
        ("append", "--max-loss-increase"): dict(annotations_of(ckpt_library.Evaluation))["max_increase"],
        ("append", "--step"): Count,
        ("compact", "--upto"): dict(annotations_of(ckpt_library.Retention))["upto"],
        ("average", "--ema"): Decay,
        ("merge", "--seed"): Count,
    }
    checked = 0
    for (owner, flag), annotation in {**of_fields, **others}.items():
        command = commands.get(owner, commands["convert"])
        (option,) = (option for option in command.params if flag in option.opts)
        bounds = [one for part in (annotation, *get_args(annotation)) for one in getattr(part, "__metadata__", ())]
        if isinstance(option.type, (click.IntRange, click.FloatRange)):
            own = option.type
            shown = Range(*(inf if one is None else one for one in (own.min, own.max)), own.min_open, own.max_open)
            assert [shown] == bounds, flag
            checked += 1
    assert checked >= 12


def test_every_option_belongs_to_a_format_and_every_exception_to_a_field() -> None:
    known = set().union(*map(fields_of, WRITABLE))
    assert set(FORMAT_OPTIONS) | WITHOUT_OPTION.keys() == known
    assert not FORMAT_OPTIONS.keys() & WITHOUT_OPTION.keys()
    for option in FORMAT_OPTIONS.values():
        assert option.formats
        assert set(option.formats) <= set(WRITABLE)
        assert len(set(option.formats)) == len(option.formats)


def test_the_default_of_a_field_is_that_of_no_option() -> None:
    """None means: as the source has it. Sizes and numbers have their default in the help text."""
    for name in WRITABLE:
        for field in fields(writable(name)):
            option = FORMAT_OPTIONS.get(field.name)
            if option is not None and field.default not in (None, False):
                assert "[default: " in option.help, (name, field.name)


@pytest.mark.parametrize("name", WRITABLE)
def test_an_option_of_another_format_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for field, option in FORMAT_OPTIONS.items():
        if name in option.formats:
            continue
        value = () if option.type is bool else (VALUES.get(field, "1"),)
        done = ckpt("convert", ZERO1, tmp_path / "out", "--to", name, option.flag, *value)
        assert done.code == 2, (option.flag, done.err)
        assert f"format {name} has no option {option.flag}" in done.err
        for other in FORMAT_OPTIONS.values():
            if name in other.formats:
                assert other.flag in done.err.partition("hint:")[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["reshard", "decompress", "restore", "average"])
def test_other_commands_refuse_it_too(command: str, tmp_path: Path) -> None:
    places = (ZERO1, ZERO1, tmp_path / "out") if command == "average" else (ZERO1, tmp_path / "out")
    done = ckpt(command, *places, "--to", "torch", "--zero", "1", "--json")
    assert done.code == 2, done.err
    error = json.loads(done.out)["error"]
    assert (error["code"], error["what"]) == (2, "format torch has no option --zero")


@pytest.mark.parametrize("name", WRITABLE)
def test_the_library_refuses_a_field_of_another_format(name: str) -> None:
    from ckpt_formats.core.errors import InvalidArgumentError

    with pytest.raises(InvalidArgumentError, match=f"format {name} has no option "):
        writable(name, no_such_field=1)


@pytest.mark.parametrize("path", sorted((ROOT / "ckpt_cli" / "commands").glob("*.py")), ids=lambda path: path.stem)
def test_a_command_is_short_and_formatted(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert "fmt:" not in text
    assert "noqa" not in text


def test_every_command_has_a_module_and_a_help_text() -> None:
    modules = {path.stem for path in (ROOT / "ckpt_cli" / "commands").glob("*.py")} - {"__init__"}
    assert {name.replace("-", "_") for name in COMMANDS} == modules
    assert set(COMMANDS) == {path.stem for path in (ROOT / "ckpt_cli" / "help").glob("*.txt")}


def test_the_methods_of_a_merge_are_those_of_the_library() -> None:
    assert get_args(Method) == METHODS
    assert set(get_args(Rescale)) == set(RESCALES)


def test_reference_lists_the_commands_that_choose_parameters_and_says_why_others_do_not() -> None:
    page = (ROOT / "docs" / "reference.md").read_text("utf-8").partition("## Parts of a checkpoint")[2]
    chosen, _, others = page.partition("## ")[0].partition("The other commands")
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        options = {param.name for param in command.params} & SELECTING
        rows = chosen if options else others
        assert options in (set(), SELECTING)
        assert any(f"`{name}`" in line.split("|")[-2] for line in rows.splitlines() if line.startswith("|")), name
