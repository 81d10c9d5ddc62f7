"""What the tables of families say of random models is what was shown to be right, and a changed line is noticed."""

import json
import random
import re
from pathlib import Path

import pytest

from family_facts import (
    FOLDER,
    Facts,
    configurations,
    digests,
    facts_of_families,
    facts_of_megatron,
    mutations,
    sample,
)
from table_mutations import check_noticed

MEGATRON = "dialects/megatron.toml"
GOLDEN = Path(__file__).parents[1] / "golden_families" / "digests.json"
MAX_LINES = 40
LONG = {"deepseek_v2", "glm4_moe", "gpt2", "gpt_oss", "mamba2", "nemotron_h"}
"""Families with names of their own for everything, or with layers of several kinds."""
FIRST = {"gpt2", "gpt_oss", "mixtral", "qwen2_moe"}
"""Families that notice most changes of packings: they are asked before all others."""


@pytest.fixture(scope="module")
def of_families() -> dict[str, Facts]:
    return facts_of_families()


def test_tables_say_what_was_shown_to_be_right(of_families: dict[str, Facts]) -> None:
    """If a table was changed on purpose: see golden_families/make.py."""
    assert digests(of_families) == json.loads(GOLDEN.read_text())


def test_changed_packings_are_noticed(of_families: dict[str, Facts]) -> None:
    """The campaign changes all lines of all tables."""
    packings = re.compile(r'= \[?"by\(\w+, (?:attention|mlp|experts)\.')
    text = (FOLDER / MEGATRON).read_text("utf-8")
    lines = text.splitlines()
    changes = [(line, changed) for line, changed in mutations(text) if packings.search(lines[line])]
    assert len(changes) > 8
    every = sorted(configurations(1).items(), key=lambda one: one[0] not in FIRST)
    truths = [(configs[0], of_families[f"{family}-0"]) for family, configs in every]
    megatron = facts_of_megatron()
    with pytest.raises(AssertionError, match="may become"):  # nothing has changed: the truths are those of the tables
        check_noticed(MEGATRON, changes[0][0], text, truths[:1], megatron)
    for line, changed in changes:
        check_noticed(MEGATRON, line, changed, truths, megatron)


def test_mutations_change_each_line() -> None:
    changes = sample(random.Random(0))
    file, line, text = next(changes)
    assert (FOLDER / file).read_text("utf-8").splitlines()[line] != text.splitlines()[line]


def test_a_family_is_short() -> None:
    lengths = {path.stem: len(path.read_text("utf-8").splitlines()) for path in (FOLDER / "families").iterdir()}
    assert {name for name, length in lengths.items() if length > MAX_LINES} <= LONG
    assert len(lengths.keys() - LONG) >= 16
