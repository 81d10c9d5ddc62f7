"""Names are matched against patterns in time bounded by both lengths, with the answers of Python's own matcher."""

import re
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core import name_patterns
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.name_patterns import backtracking, check_pattern, full_match, match_start, search

SECONDS = 5.0
"""Of a processor: what was unbounded took hours."""

LEAVES = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\n", "B", "(?i:b)", "(?s:.)", "1", "", "^", "$", r"\Z", r"\A"]
)


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}", "{0}"])
    return st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(LEAVES, _grown, max_leaves=8)
NAMES = st.text("abB1\n", max_size=8)


@given(PATTERNS, st.lists(NAMES, min_size=1, max_size=5))
def test_steps_give_the_answers_of_the_backtracking_matcher(pattern: str, names: list[str]) -> None:
    compiled = name_patterns._NamePattern(pattern)
    steps = name_patterns._steps_of(compiled)
    assert steps is not None
    for name in names:
        assert steps.matches(name, "all") == bool(re.fullmatch(pattern, name)), (pattern, name)
        assert steps.matches(name, "start") == bool(re.match(pattern, name)), (pattern, name)
        assert steps.matches(name, "anywhere") == bool(re.search(pattern, name)), (pattern, name)
        assert full_match(pattern, name) == bool(re.fullmatch(pattern, name)), (pattern, name)
        assert match_start(pattern, name) == bool(re.match(pattern, name)), (pattern, name)


SLOW = ["[a-z]*[a-z]*[a-z]*1", ".*.*.*.*1", r".*a.*a.*a.*1", "[a-z]*?[a-z]*?[a-z]*?1", "(?i)[A-Z]*[a-z]*[a-z]*1"]


@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.timeout(60)
def test_repeats_in_a_row_end_soon_on_long_names(pattern: str) -> None:
    check_pattern(pattern, "here")
    start = time.process_time()
    for i in range(20):
        assert not full_match(pattern, "a" * 2000 + str(i + 2) + "b")
    assert not search(pattern, "a" * 2000)
    assert full_match(pattern, "a" * 2000 + "1")
    assert time.process_time() - start < SECONDS


@pytest.mark.timeout(60)
def test_pattern_for_python_alone_is_refused_when_it_takes_too_long() -> None:
    pattern = r"(?=[a-z]*[a-z]*[a-z]*1)a"
    check_pattern(pattern, "here")
    assert not full_match(pattern, "a" * 20)
    with pytest.raises(UnsafeError, match=r"may take too long to match a name of 2,000 characters"):
        full_match(pattern, "a" * 2000)
    with pytest.raises(UnsafeError, match=r"2,000 characters"):
        backtracking("[a-z]*[a-z]*[a-z]*1", 2000)


@pytest.mark.timeout(60)
def test_repeats_of_repeats_are_refused_before_they_are_built() -> None:
    for pattern in (r"((a{60}){60}){60}.*.*.*", r"(){60000}.*.*.*.*"):
        check_pattern(pattern, "here")
        start = time.process_time()
        with pytest.raises(UnsafeError, match="may take too long"):
            full_match(pattern, "a" * 1000)
        assert time.process_time() - start < SECONDS


@pytest.mark.timeout(60)
def test_the_work_of_one_pattern_is_bounded_for_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "_MAX_TESTS", 10_000)
    monkeypatch.setattr(name_patterns, "_MAX_KEPT", 0)
    pattern = ".*".join("abcdefgh") + ".*[xyz]"
    random = Random(1)
    names = ["a" + "".join(random.choices("abcdefgh", k=200)) for _ in range(100)]
    with pytest.raises(UnsafeError, match="all these names"):
        [full_match(pattern, name) for name in names]


def test_rules_of_thousands_of_parameters_are_found_without_many_matches() -> None:
    names = [f"layers.{i}.weight" for i in range(600)]
    layout = Layout(tuple(Rule(f"(?:{re.escape(name)}).*", axis=i % 2) for i, name in enumerate(names)))
    start = time.process_time()
    assert [layout.rule(name).axis for name in names] == [i % 2 for i in range(600)]
    assert time.process_time() - start < SECONDS
