"""Tables and long lines in terminals of any width."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.text import folded
from damage import SAMPLES, ckpt

_words = st.lists(st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=30), min_size=1, max_size=20)


@given(_words, st.integers(20, 200), st.integers(0, 9))
def test_a_line_is_broken_at_spaces_only(words: list[str], room: int, indent: int) -> None:
    line = " " * indent + " ".join(words)
    lines = list(folded(line, room))
    assert [word for one in lines for word in one.split()] == words
    for one in lines:
        assert len(one) <= room or len(one.split()) == 1


@pytest.mark.parametrize("width", [40, 80, 100, 300])
def test_no_number_and_no_name_is_broken_in_a_table(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = ckpt("log", SAMPLES / "universal-1-delta").out
    assert "  62.9 KiB  3.7 MiB   60.65" in out
    assert "…" not in out
    assert all(name in out for name in ("second-moment", "approximate:", "0.00098"))
    table = out.partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= max(width, 93)
    assert (len(table) == 8) == (width == 300)


def test_colours_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = SAMPLES / "universal-1-delta"
    assert "\x1b" not in ckpt("log", chain).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1m" in ckpt("log", chain).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in ckpt("log", chain).out  # no colour; bold is none
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in ckpt("log", chain).out
