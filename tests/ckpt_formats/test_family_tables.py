"""What the tables of families say of random models is what was shown to be right, and a changed line is noticed."""

import json
import random
from pathlib import Path

from family_facts import FOLDER, digests, sample
from table_mutations import rounds

GOLDEN = Path(__file__).parents[1] / "golden_families" / "digests.json"
MAX_LINES = 40
LONG = {"deepseek_v2", "glm4_moe", "gpt2", "gpt_oss", "mamba2", "nemotron_h"}
"""Families with names of their own for everything, or with layers of several kinds."""


def test_tables_say_what_was_shown_to_be_right() -> None:
    """If a table was changed on purpose: see golden_families/make.py."""
    assert digests() == json.loads(GOLDEN.read_text())


def test_changed_lines_are_noticed(tmp_path: Path) -> None:
    for _, one in zip(range(5), rounds(tmp_path, random.randrange(10**6)), strict=False):
        one.run()


def test_mutations_change_each_line() -> None:
    changes = sample(random.Random(0))
    file, line, text = next(changes)
    assert (FOLDER / file).read_text("utf-8").splitlines()[line] != text.splitlines()[line]


def test_a_family_is_short() -> None:
    lengths = {path.stem: len(path.read_text("utf-8").splitlines()) for path in (FOLDER / "families").iterdir()}
    assert {name for name, length in lengths.items() if length > MAX_LINES} <= LONG
    assert len(lengths.keys() - LONG) >= 16
