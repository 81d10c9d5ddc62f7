"""Fewer tensors, fewer states, another element type: lazy, and exactly what was asked for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.job import save
from ckpt.pipeline import Execution, check_complete
from ckpt_formats.core.checkpoint import MASTER, MODEL
from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, is_float
from ckpt_formats.core.edits import cast, select, weights_only
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, RulesError, UnsafeError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Value
from ckpt_formats.universal import Universal
from held import bits, contents, everything, folder

SOURCE = everything()
MODEL_NAMES = [name for name, p in SOURCE.parameters.items() if p.role != "extra"]
CHOICES = ["layers", r"\.w$", "alone", "^frozen$", "count|empty", "e", r"layers\.0"]
patterns = st.lists(st.sampled_from(CHOICES), max_size=3)


def matching(chosen: list[str]) -> set[str]:
    import re

    return {name for name in MODEL_NAMES if any(re.search(pattern, name) for pattern in chosen)}


@given(patterns, patterns)
def test_select_takes_what_matches_and_is_not_skipped(keep: list[str], drop: list[str]) -> None:
    selected = select(SOURCE, keep, drop)
    expected = (matching(keep) if keep else set(MODEL_NAMES)) - matching(drop)
    assert {name for name, p in selected.parameters.items() if p.role != "extra"} == expected
    assert [n for n in SOURCE.parameters if n in selected.parameters] == list(selected.parameters), "in the same order"
    assert all(selected.parameters[name] is SOURCE.parameters[name] for name in expected), "and untouched"
    assert selected.extras == SOURCE.extras
    assert "rng/cpu" in selected.parameters, "extras stay"
    assert [g.options for g in selected.groups] == [g.options for g in SOURCE.groups]
    assert [g.names for g in selected.groups] == [tuple(n for n in g.names if n in expected) for g in SOURCE.groups]
    assert set(selected.aliases.values()) <= expected
    check_complete(selected)


@given(patterns.filter(len))
def test_keeping_and_skipping_the_same_are_complements(chosen: list[str]) -> None:
    kept, skipped = select(SOURCE, chosen, []), select(SOURCE, [], chosen)
    both = [set(contents(half)) for half in (kept, skipped)]
    assert both[0] | both[1] == set(contents(SOURCE))
    assert {name for name, _ in both[0] & both[1]} == {"rng/cpu"}


@given(patterns, patterns)
def test_choosing_twice_is_choosing_once(keep: list[str], drop: list[str]) -> None:
    once = select(SOURCE, keep, drop)
    left = [p for p in keep if any(__import__("re").search(p, n) for n in once.parameters)]
    if left == keep:
        assert select(once, keep, []).parameters == once.parameters


@pytest.mark.parametrize("side", ["keep", "drop"])
def test_a_pattern_that_matches_nothing_is_surely_mistyped(side: str) -> None:
    given = (["layer.0", "nothing"], []) if side == "keep" else ([], ["nothing"])
    with pytest.raises(NoMatchError, match=r"nothing|layer\.0"):
        select(SOURCE, *given)


def test_patterns_that_are_none_or_never_end_are_refused() -> None:
    with pytest.raises(RulesError, match="not a regular expression"):
        select(SOURCE, ["("], [])
    with pytest.raises(UnsafeError):
        select(SOURCE, [], ["(a+)+$"])


def test_the_model_alone_has_its_weights_and_nothing_else() -> None:
    selected = weights_only(SOURCE)
    assert list(selected.parameters) == MODEL_NAMES
    for name, p in selected.parameters.items():
        assert list(p.states) == [MODEL]
        assert p.values == {}
        assert p.role == SOURCE.parameters[name].role
        assert bits(read(p.states[MODEL])) == bits(read(SOURCE.parameters[name].weight))
    assert (selected.groups, selected.extras, selected.aliases) == ((), {}, SOURCE.aliases)
    assert contents(weights_only(selected)) == contents(selected)


def test_the_model_alone_keeps_what_says_its_sizes() -> None:
    entries: dict[str, Value] = {"args": "its arguments", "hf/config.json": {"hidden_size": 8}}
    assert weights_only(replace(SOURCE, extras={**SOURCE.extras, **entries})).extras == entries


@pytest.mark.parametrize("name", [*SHORT_NAMES, *(n for n, d in DTYPES.items() if is_float(d) and "e8m0" not in n)])
def test_weights_are_the_masters_rounded_and_all_else_stays(name: str) -> None:
    dtype = DTYPES[SHORT_NAMES.get(name, name)]
    converted = cast(SOURCE, name, allow_overflow=True)
    before, after = contents(SOURCE), contents(converted)
    assert after.keys() == before.keys()
    for (parameter, state), values in after.items():
        original = SOURCE.parameters[parameter]
        weight = original.states.get(MASTER, original.weight)
        if state == MODEL and original.role != "extra" and is_float(weight.dtype):
            with np.errstate(all="ignore"):
                assert values == bits(read(weight).astype(dtype))
        else:
            assert values == before[parameter, state]
    assert contents(cast(converted, name)) == after


def test_casting_to_what_it_is_changes_nothing() -> None:
    source = weights_only(SOURCE)
    for name in {p.weight.dtype.name for p in source.parameters.values() if is_float(p.weight.dtype)}:
        chosen = [n for n, p in source.parameters.items() if p.weight.dtype.name == name]
        converted = select(cast(source, name), [f"^{n}$" for n in chosen], [])
        assert contents(converted) == {key: value for key, value in contents(source).items() if key[0] in chosen}


@pytest.mark.parametrize("name", ["int8", "bool", "complex64", "nonsense", "", "FP32"])
def test_cast_refuses_types_that_are_no_floats(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not a floating-point type"):
        cast(SOURCE, name)


@given(patterns, st.sampled_from(["bf16", "fp16", "fp32", "float8_e4m3fn"]), st.booleans())
def test_save_writes_the_changes_of_select(drop: list[str], name: str, alone: bool) -> None:
    changed = cast(select(SOURCE, [], drop), name, allow_overflow=True)
    if alone:
        changed = weights_only(changed)
    with folder() as at:
        save(changed, at / "target", Universal(), resources=Execution(1, 1 << 16))
        assert contents(Universal().read(at / "target", ReadOptions())) == contents(changed)


def test_select_reads_no_data(tmp_path: Path) -> None:
    """The files may be noise of the right size."""
    save(SOURCE, tmp_path / "source", Universal(), resources=Execution(1))
    opened = Universal().read(tmp_path / "source", ReadOptions())
    for shard in opened.files:
        shard.path.unlink()
    changed = cast(weights_only(select(opened, ["layers"], [])), "bf16")
    check_complete(changed)
    assert [p.weight.dtype.name for p in changed.parameters.values()] == ["bfloat16"] * 2


def test_names_are_changed_by_prefixes_and_patterns() -> None:
    from ckpt.rename import rename_by

    renamed = rename_by(SOURCE, [(r"^(\d)\.", r"block\1.")], strip_prefix="layers.", add_prefix="model.")
    expected = {}
    for name in SOURCE:
        short = name.removeprefix("layers.")
        expected[name] = f"model.block{short}" if short[0].isdigit() else f"model.{short}"
    assert [*renamed] == [*expected.values()]
    for old, new in expected.items():
        assert bits(read(renamed[new].weight)) == bits(read(SOURCE[old].weight))
    assert [group.names for group in renamed.groups] == [tuple(expected[n] for n in g.names) for g in SOURCE.groups]
    for wrong, kind in (
        ({"patterns": [("nought", "x")]}, NoMatchError),
        ({"strip_prefix": "nought"}, NoMatchError),
        ({"patterns": [(".*", "same")]}, InvalidArgumentError),
        ({"patterns": [("(", "")]}, RulesError),
        ({"patterns": [("w", r"\3")]}, RulesError),
        ({"patterns": [("(a+)+b", "")]}, UnsafeError),
        ({"patterns": [("", "x" * 1000), ("", r"\g<0>" + "x" * 990)]}, UnsafeError),
        ({"patterns": [("x*", "x" * 2000)]}, UnsafeError),
        ({"patterns": [("(.*)", r"\1" * 400), ("(.*)", r"\1" * 400)]}, UnsafeError),
    ):
        with pytest.raises(kind):
            rename_by(SOURCE, **wrong)
