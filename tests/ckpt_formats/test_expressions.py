"""Expressions over a configuration: what they compute, and that no value of an untrusted file does harm."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.names.expressions import Expression, InnerScope, evaluate, names_of, natural, parse_expression

CONFIG: dict[str, object] = {
    "heads": 8,
    "head_dim": None,
    "hidden": 512,
    "model_type": "qwen3_moe",
    "eps": 1e-6,
    "tied": True,
    "mlp_only_layers": [0, 3],
    "layer_types": ["full_attention", "linear"],
    "rope": {"type": "yarn", "factors": [1.0, 2.0]},
}

HUGE = 10**5000
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**300) | st.just(1 << 62),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hidden // heads", 64),
        ("hidden // heads * -2 + 7 % 4 - 1", -126),
        ("head_dim or hidden // heads", 64),
        ("0 if tied else 1", 0),
        ("missing", None),
        ("missing == None and head_dim == None and heads != None", True),
        ("not tied or heads and 'x'", "x"),
        ("3 in mlp_only_layers", True),
        ("1 not in mlp_only_layers", True),
        ("1 in missing", False),
        ("1 not in missing", True),
        ("'type' in rope", True),
        ("model_type in ['qwen2_moe', 'qwen3_moe']", True),
        ("model_type in ('qwen2_moe',)", False),
        ("eps < 0.001", True),
        ("heads >= 8.5", False),
        ("eps", 1e-6),
        ("layer_types[1]", "linear"),
        ("layer_types[-1]", "linear"),
        ("missing[3]", None),
        ("rope['absent']", None),
        ("rope['absent'][0]['x']", None),
        ("rope['factors'][1]", 2.0),
        ("(heads, 'a', [1])", (8, "a", [1])),
        ("[n * 2 for n in 3]", [0, 2, 4]),
        ("[kind == 'linear' for kind in layer_types]", [False, True]),
        ("[heads for heads in mlp_only_layers if heads]", [3]),
        ("[n + heads for n in 1][0] + heads", 16),
    ],
)
def test_expression_has_the_value_that_python_gives(text: str, value: object) -> None:
    result = evaluate(parse_expression(text), CONFIG)
    assert (type(result), result) == (type(value), value)


@pytest.mark.parametrize(
    "text",
    [
        *("f(1)", "a.b", "a ** b", "a / b", "+a", "~a", "a & b", "a << 1", "a @ b", "1 < a < 3", "a is None", "a[1:2]"),
        *("lambda: 1", "{1: 2}", "{1}", "{a for a in b}", "(a for a in b)", "f'{a}'", "b'a'", "1j", "...", "[*a]"),
        *("a := 1", "(a := 1)", "a = 1", "", "1 +", "import os", "a; b", "await a", "(" * 300 + "a" + ")" * 300),
        *("[a for a in b for c in d]", "[a for a in b if a if c]", "[[a for a in b] for c in d]", "[a for a, c in b]"),
        *("[a for a in [b for b in 3]]", "[a async for a in b]", "'a' '\0'"),
    ],
)
def test_parser_refuses_all_else(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|comprehension"):
        parse_expression(text)


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        (
            "heads * head_dim",
            {"heads": "x", "head_dim": 64},
            "`heads * head_dim` cannot be computed with heads = 'x'",
        ),
        ("n * n", {"n": "ab\x1b[2J" * 99}, r"n = 'ab\x1b[2Jab"),
        ("n * 2", {"n": [1] * 9}, "n = a list of 9"),
        ("n * 2", {"n": {"a": 1}}, "n = a table of 1"),
        ("n * 2", {"n": True}, "n = True"),
        ("n * 2", {"n": 2.0}, "n = 2.0"),
        ("-n", {"n": False}, "n = False"),
        ("n + 1", {"n": HUGE}, "n = an integer of 16610 bits"),
        ("n * n * n", {"n": 1 << 31}, "n = 2147483648"),
        ("n", {"n": 1 + (1 << 62)}, "n = 4611686018427387905"),
        ("n // m", {"n": 4, "m": 0}, "n = 4, m = 0"),
        ("n % m", {"n": 4}, "n = 4, m = None"),
        ("n < 3", {"n": None}, "n = None"),
        ("n < 'b'", {"n": "a"}, "n = 'a'"),
        ("n < 3", {"n": True}, "n = True"),
        ("n[m]", {"n": [1, 2], "m": 2}, "n = a list of 2, m = 2"),
        ("n[m]", {"n": [1, 2], "m": True}, "m = True"),
        ("n[m]", {"n": "text", "m": 0}, "n = 'text'"),
        ("n[m]", {"n": {"0": 1}, "m": 0}, "m = 0"),
        ("'t' in n", {"n": "text"}, "n = 'text'"),
        ("n in m", {"n": [1], "m": {}}, "n = a list of 1, m = a table of 0"),
        ("1 in n", {"n": [0] * 10_001}, "n = a list of 10001"),
        ("[1 for a in n]", {"n": 100_001}, "n = 100001"),
        ("[1 for a in n]", {"n": -1}, "n = -1"),
        ("[1 for a in n]", {"n": "text"}, "n = 'text'"),
        ("[1 for a in n]", {"n": [0] * 100_001}, "n = a list of 100001"),
        ("[n // a for a in 2]", {"n": 1}, "`[n // a for a in 2]` cannot be computed with n = 1"),
        ("1 // 0", {}, "`1 // 0` cannot be computed"),
    ],
)
def test_unsuitable_values_are_named(text: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptError) as caught:
        evaluate(parse_expression(text), values)
    assert str(caught.value).startswith("config.json: `")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_file_of_the_values_is_named() -> None:
    with pytest.raises(CorruptError, match=r"^args: `-a` cannot be computed with a = None$"):
        evaluate(parse_expression("-a"), {}, "args")


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    first: list[Any] = []
    second: list[Any] = []
    for _ in range(100_000):
        first, second = [first], [second]
    with pytest.raises(CorruptError, match="cannot be computed with a = a list of 1, b = a list of 1"):
        evaluate(parse_expression("a == b"), {"a": first, "b": second})


@given(st.data())
def test_hostile_values_are_computed_or_refused(data: st.DataObject) -> None:
    """Whatever the values are, the result is one of them, a boolean, a small integer, or an error of ckpt."""
    operation = data.draw(
        st.sampled_from(["+", "-", "*", "//", "%", "<", ">=", "==", "!=", "in", "not in", "and", "or"])
    )
    text = data.draw(
        st.sampled_from([f"a {operation} b", f"[a {operation} n for n in b]", "a[b]", "-a", "a if b else 1"])
    )
    scope = {"a": data.draw(HOSTILE), "b": data.draw(HOSTILE)}
    try:
        value = evaluate(parse_expression(text), scope)
    except CorruptError:
        return
    assert type(value) is not int or abs(value) <= 1 << 62


def test_names_are_those_that_a_scope_must_have() -> None:
    expression = parse_expression("[a * n for n in b if n not in c] and n[True] or a")
    assert names_of(expression) == {"a", "b", "c", "n"}
    assert names_of(parse_expression("[n for n in 3]")) == set()


def test_expressions_are_equal_by_their_texts() -> None:
    one: Expression = parse_expression(" a+b ")
    assert one.text == "a+b"
    assert one != parse_expression("a + b")
    assert one == parse_expression("a+b")


@pytest.mark.parametrize("value", [-1, True, None, 1.0, "1", [1], 1 << 63])
def test_natural_is_an_integer_from_zero_on(value: object) -> None:
    assert natural(parse_expression("n"), {"n": 0}) == 0
    with pytest.raises(CorruptError, match="`n`"):
        natural(parse_expression("n"), {"n": value})


@given(
    outer=st.dictionaries(st.sampled_from("abc"), st.integers()),
    own=st.dictionaries(st.sampled_from("bcd"), st.integers()),
)
def test_inner_scope_is_as_a_merged_dict_and_follows_the_outer_one(
    outer: dict[str, object], own: dict[str, object]
) -> None:
    inner, merged = InnerScope(outer, own), {**outer, **own}
    assert (dict(inner), len(inner)) == (merged, len(merged))
    assert [inner.get(name, 7) for name in "abcde"] == [merged.get(name, 7) for name in "abcde"]
    outer["new"] = 1
    assert inner["new"] == 1  # shared, not copied
    with pytest.raises(KeyError):
        inner["e"]
