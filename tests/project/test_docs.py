"""The documentation is true: its links resolve, its commands exist, its example works, and nothing is left out."""

import pkgutil
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from ckpt_cli.commands.doctor import UNFIT
from ckpt_cli.main import COMMANDS, FAULT, INTERRUPTED, PIPE_CLOSED, TERMINATED, cli
from ckpt_cli.options.exit_codes import EXIT_CODES
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.rules import read_rules
from ckpt_formats.registry import FORMATS, ONLY_READ, format_named
from ckpt_formats.registry.location import detect
from damage import ckpt

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
README = (ROOT / "README.md").read_text("utf-8")
REFERENCE = (DOCS / "reference.md").read_text("utf-8")
SAMPLE = ROOT / "sample_checkpoints" / "deepspeed-0.19-zero1-bf16-dp2"


def anchors(page: Path) -> set[str]:
    """What a heading is called in links, as GitHub has it."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def option_names(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def commands_in(page: Path) -> list[list[str]]:
    """Every `ckpt ...` line of the page's shell blocks, in words; make's, pip's and outputs are left out."""
    commands = []
    blocks = re.findall(r"^```(?:console|bash|sh|shell)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = words[: words.index("|")] if "|" in words else words
        if words and Path(words[0]).name == "ckpt":
            commands.append(words)
    return commands


@pytest.mark.parametrize("name", ["cli", "families", "json"])
def test_a_generated_page_is_what_its_script_writes(name):
    generated = runpy.run_path(str(DOCS / f"make_{name}.py"))["page"]()
    assert (DOCS / f"{name}.md").read_text("utf-8") == generated, f"run `python docs/make_{name}.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_resolves(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_exist_with_their_options(page):
    for _, name, *words in commands_in(page):
        if name.startswith("-"):
            assert name in option_names(cli) | {"--version"}
            continue
        assert name in COMMANDS, name
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for word in words:
            if word.startswith("-"):
                assert word.partition("=")[0] in option_names(command), f"ckpt {name} {word}"


def test_commands_of_the_readme_run_as_printed(tmp_path, monkeypatch):
    (tmp_path / "sample_checkpoints").symlink_to(ROOT / "sample_checkpoints")
    monkeypatch.chdir(tmp_path)
    (shell,) = re.findall(r"<!-- runs -->\n```console\n(.*?)```", README, re.DOTALL)
    commands = [shlex.split(line.removeprefix("$ "), comments=True) for line in shell.splitlines()]
    assert len(commands) == 8
    for _, *words in commands:
        assert ckpt(*words).code == 0, words
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert detect(tmp_path / "for-fsdp").name == "dcp"


def test_the_demo_is_what_the_readme_shows_first():
    block = README[README.index("$ pip install") :].partition("```")[0]
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ndemo:")[2].partition("\n\n")[0]
    shown = [line.removeprefix("$ ckpt ") for line in block.splitlines() if line.startswith("$ ckpt ")]
    run = [line.partition("/ckpt ")[2].replace("demo-universal", "universal") for line in recipe.splitlines()]
    assert shown == [line for line in run if line]


def test_every_exit_code_is_documented():
    codes = {0, 1, 2, UNFIT, FAULT, INTERRUPTED, PIPE_CLOSED, TERMINATED, *EXIT_CODES.values()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)} == codes


def test_the_readme_runs_what_the_makefile_and_the_samples_have():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for target in re.findall(r"^(?:\$ )?make (\w+)", README, re.MULTILINE):
        assert target in targets
    for path in re.findall(r"sample_checkpoints/[\w./-]+", README):
        assert (ROOT / path.rstrip("./")).exists(), path


def test_every_format_is_documented():
    rows = re.findall(r"^\| `([\w-]+)` \|", REFERENCE, re.MULTILINE)
    assert sorted(rows) == sorted(FORMATS)
    text = "".join(page.read_text("utf-8") for page in sorted(DOCS.glob("*.md")) if page.name != "cli.md")
    for name in FORMATS:
        assert f"`{name}`" in text, name
    for page in (README, (DOCS / "compare.md").read_text("utf-8")):
        assert re.findall(r"\[(\d+) formats\]", page) == [str(len(FORMATS))]


def test_help_names_the_formats_that_can_be_written():
    assert set(ONLY_READ) == {name for name in FORMATS if not isinstance(format_named(name), WritableFormat)}


def test_the_page_of_rooms_has_every_module_and_every_noun_with_a_docstring():
    script = runpy.run_path(str(DOCS / "make_architecture.py"))
    rooms, nouns = script["rooms"](), script["nouns"]()
    for package in script["PACKAGES"]:
        names = {name for _, name, _ in pkgutil.iter_modules([str(ROOT / package)]) if not name.startswith("_")}
        assert {room.name for room in rooms if room.package == Path(package).name} == names
    assert [one for one in (*rooms, *nouns) if not one.what] == []
    assert len(nouns) > 30
    for noun in nouns:
        assert isinstance(getattr(import_module(noun.module), noun.name), type), noun


def test_the_page_of_the_architecture_takes_two_screens():
    assert len((DOCS / "architecture.md").read_text("utf-8").splitlines()) <= 120


def test_rules_in_the_page_are_rules(tmp_path):
    blocks = dict(re.findall(r"<!-- rules: (\w+) -->\n```toml\n(.*?)```", (DOCS / "rules.md").read_text(), re.DOTALL))
    rules: dict[str, tuple[Rule, ...]] = {}
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
        rules[name] = read_rules(tmp_path / name)
    assert rules["rows"][1].matches("blocks.0.mlp.down.weight")
    assert rules["qkv"][0].fused == (512, 128, 128)
    assert rules["swiglu"][0].fused == 2
    assert rules["widths"][0].widths == ((256, 256), (64, 0), (0, 64))
    assert rules["vocabulary"][0].vocabulary == 50257
    assert rules["differing"][0].how == "averaged"


def test_the_page_of_recording_shows_lines_of_its_examples():
    """Which other tests run: each line stands in the script, in this order."""
    blocks = re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", (DOCS / "recording.md").read_text(), re.DOTALL)
    assert len(blocks) > 4
    for name, block in blocks:
        lines = iter(map(str.strip, (ROOT / "examples" / "recording" / name).read_text("utf-8").splitlines()))
        for line in filter(None, map(str.strip, block.splitlines())):
            assert line in lines, f"{name}: {line}"


def test_the_page_of_planning_shows_what_plans_print():
    blocks = re.findall(
        r"<!-- runs -->\n```console\n\$ ckpt ([^\n]*)\n(.*?)```", (DOCS / "planning.md").read_text(), re.DOTALL
    )
    assert len(blocks) == 3
    for command, printed in blocks:
        assert ckpt(*shlex.split(command)).out == printed
