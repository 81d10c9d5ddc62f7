"""Sixty wrong and odd invocations: each message names what, where, and what to do."""

import json
import re
import sys
from pathlib import Path

import pytest

from ckpt_cli.main import COMMANDS
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
