"""Sixty wrong and odd invocations: each message names what, where, and what to do."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import click
import pytest

from ckpt_cli.main import COMMANDS, cli
from ckpt_cli.options.types import CheckpointPath
from ckpt_formats.core.errors import UnsupportedError
from damage import Ran, ckpt
from odd_invocations import ODD, make_places

_NO_ERROR = {"a diff of other models"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    make_places(folder)
    return folder


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".lock"}


def checked(done: Ran) -> None:
    assert "Traceback" not in done.err + done.out
    assert "fault of ckpt" not in done.err
    assert max(map(len, done.err.splitlines())) < 600
    labels = re.findall(r"^(error|where|hint): (.*)$", done.err, re.MULTILINE)
    assert [label for label, _ in labels] == ["error", "where", "hint"], done.err
    assert all(text.strip() and "None" not in text for _, text in labels)


def test_odd_invocations_are_sixty_and_of_all_commands_that_read_or_write() -> None:
    assert len(ODD) >= 60
    unused = set(COMMANDS) - {odd.arguments.split()[0] for odd in ODD.values()}
    assert unused <= {
        "restore",
        "rules",
        "shadow",
        "serve",
        "hold",
        "compress",
        "decompress",
        "formats",
        "clean",
        "doctor",
        "seal",
    }


_MAY_BE_URLS = {"config", "output"}
"""Options of paths that are no checkpoints, and may be in a store."""


def test_each_option_of_a_file_is_known_to_take_a_url_or_refuses_it() -> None:
    context = click.Context(cli)
    files = 0
    for command in map(partial(cli.get_command, context), COMMANDS):
        assert command is not None
        for one in command.params:
            if not isinstance(one.type, click.Path) or isinstance(one.type, CheckpointPath):
                continue
            if one.name in _MAY_BE_URLS:
                continue
            files += 1
            with pytest.raises(UnsupportedError) as refused:
                one.type.convert("s3://bucket/file", one, context)
            shown = one.opts[0] if isinstance(one, click.Option) else "TARGET"
            assert refused.value.what.startswith(f"{shown} ")
            assert (refused.value.where, bool(refused.value.hint)) == ("s3://bucket/file", True)
    assert files > 40


@pytest.mark.parametrize("name", ODD)
def test_a_message_says_what_where_and_what_to_do(name: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places)
    odd = ODD[name]
    before = left(places)
    done = ckpt(*odd.arguments.split())
    assert done.code == odd.code, done.err
    for words in odd.says:
        assert words in done.err + done.out
    if name in _NO_ERROR:
        return
    checked(done)
    report = json.loads(ckpt(*odd.arguments.split(), "--json").out)
    if odd.arguments.startswith("verify") and "findings" in report:
        assert not report["ok"]
    elif odd.arguments.split()[0] in COMMANDS:
        assert report["error"]["code"] == odd.code
        assert report["error"]["where"]
        assert report["error"]["hint"]
    assert left(places) == before
    assert sys.stdout is not None
