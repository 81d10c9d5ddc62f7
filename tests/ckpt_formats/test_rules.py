"""The language of rules: what it says, what it refuses, and that no pattern can run for ever."""

import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from ckpt_formats.core.errors import NotFoundError, RulesError, UnsafeError
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.rules import read_rules, rule_set, safe_pattern, shipped
from ckpt_formats.engines.megatron.shared.rules import SETS

GOOD = {
    "match = 'a'": Rule("a"),
    "match = 'a'\naxis = 1": Rule("a", axis=1),
    "match = 'a'\nfused = 2": Rule("a", fused=2),
    "match = 'a'\nfused = [64, 32, 32]": Rule("a", fused=(64, 32, 32)),
    "match = 'a'\nwidths = [[3, 5], [2, 2]]": Rule("a", widths=((3, 5), (2, 2))),
    "match = 'a'\nvocabulary = 50257": Rule("a", vocabulary=50257),
    "match = 'a'\nhow = 'replicated'": Rule("a", "replicated"),
    "match = 'a'\nhow = 'averaged'": Rule("a", "averaged"),
    "match = 'a'\nhow = 'first'": Rule("a", "first"),
    "match = 'a'\nhow = 'sharded'\naxis = 2\nfused = 3": Rule("a", axis=2, fused=3),
    "match = 'a'\nhow = 'unique'": Rule("a", "unique"),
    "match = 'a'\nfused = ['ffn', 'heads * 2', 3]": Rule("a", fused=("ffn", "heads * 2", 3)),
    "match = 'a'\nlength = '2 * ffn + 1'\nunits = 'groups'": Rule("a", length="2 * ffn + 1", units="groups"),
    "match = 'a'\nlength = 12\npadded = true": Rule("a", length=12, padded=True),
    "match = 'a'\nover = 'expert'\nwhen = 'gated'": Rule("a", over="expert", when="gated"),
}

BAD = {
    "match missing": ("axis = 1", "needs `match`"),
    "match a number": ("match = 1", "needs `match`"),
    "match no expression": ("match = '('", "not a regular expression"),
    "match an expression of too much": ("match = 'a{99999999999999999999}'", "not a regular expression"),
    "unknown key": ("match = 'a'\naxes = 1", "unknown key 'axes'"),
    "unknown how": ("match = 'a'\nhow = 'split'", "`how` is 'split'"),
    "blocks, which only engines say": ("match = 'a'\nhow = 'blocks'", "`how` is 'blocks'"),
    "how a list": ("match = 'a'\nhow = ['first']", "`how` is"),
    "axis below zero": ("match = 'a'\naxis = -1", "whole numbers from 0"),
    "axis true": ("match = 'a'\naxis = true", "whole numbers from 0"),
    "axis a text": ("match = 'a'\naxis = '0'", "whole numbers from 0"),
    "axis a fraction": ("match = 'a'\naxis = 1.0", "whole numbers from 0"),
    "length of an unknown language": ("match = 'a'\nlength = 'ffn / 2'", "`length` is a formula"),
    "length that calls": ("match = 'a'\nlength = 'open(1)'", "`length` is a formula"),
    "units a list": ("match = 'a'\nunits = [2]", "`units` is a formula"),
    "when a number": ("match = 'a'\nwhen = 1", "`when` is a formula"),
    "fused a formula that is none": ("match = 'a'\nfused = ['a b']", "`fused` is a count"),
    "over nobody": ("match = 'a'\nover = 'data'", "`over` is tensor or expert"),
    "padded a text": ("match = 'a'\npadded = 'yes'", "`padded` is true or false"),
    "vocabulary below zero": ("match = 'a'\nvocabulary = -5", "whole numbers from 0"),
    "vocabulary a date": ("match = 'a'\nvocabulary = 2024-01-01", "whole numbers from 0"),
    "fused none": ("match = 'a'\nfused = 0", "`fused` is a count"),
    "fused empty": ("match = 'a'\nfused = []", "`fused` is a count"),
    "fused texts": ("match = 'a'\nfused = ['a-b']", "`fused` is a count"),
    "fused below zero": ("match = 'a'\nfused = [4, -4]", "`fused` is a count"),
    "widths flat": ("match = 'a'\nwidths = [3, 5]", "`widths` is a list"),
    "widths a number": ("match = 'a'\nwidths = 3", "`widths` is a list"),
    "widths below zero": ("match = 'a'\nwidths = [[3, -5]]", "`widths` is a list"),
}

BAD_FILES = {
    "not TOML": "match = ",
    "a key twice": "[[rule]]\nmatch = 'a'\nmatch = 'b'",
    "a table, not tables": "[rule]\nmatch = 'a'",
    "another table": "[[rule]]\nmatch = 'a'\n[other]\nx = 1",
    "nothing": "",
    "not UTF-8": b"[[rule]]\nmatch = '\xff'",
    "a text for rules": "rule = 'a'",
    "texts for rules": "rule = ['a']",
    "nested without end": "rule = " + "[" * 50_000,
    "a number without end": "[[rule]]\nmatch = 'a'\naxis = " + "9" * 10_000,
}


@pytest.mark.parametrize("entry", GOOD)
def test_rule_is_parsed_to_its_meaning(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(f"[[rule]]\n{entry}\n")
    (rule,) = read_rules(path)
    assert rule == Rule(
        **{**{f: getattr(GOOD[entry], f) for f in Rule.__dataclass_fields__}, "origin": f"{path}, rule 1"}
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_rule_is_refused_by_its_number(kind: str, tmp_path: Path) -> None:
    entry, expected = BAD[kind]
    path = tmp_path / "rules.toml"
    path.write_text(f"[[rule]]\nmatch = 'good'\n[[rule]]\n{entry}\n")
    with pytest.raises(RulesError, match=re.escape(expected)) as caught:
        read_rules(path)
    assert caught.value.where == f"{path}, rule 2"


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_malformed_file_is_refused(kind: str, tmp_path: Path) -> None:
    path, content = tmp_path / "rules.toml", BAD_FILES[kind]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RulesError) as caught:
        read_rules(path)
    assert str(caught.value.where).startswith(str(path))


def test_rules_keep_their_order_and_an_absent_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("\n".join(f"[[rule]]\nmatch = 'r{i}'" for i in range(20)))
    assert [rule.pattern for rule in read_rules(path)] == [f"r{i}" for i in range(20)]
    with pytest.raises(NotFoundError):
        read_rules(tmp_path / "absent.toml")


ORDINARY = [
    r"layers\.\d+\.attn\.qkv\.(weight|bias)",
    r"^blocks\.0\.mlp\.up\.weight$",
    r".*norm\d?\.weight",
    r".*\.layers\.\d+\..*\.weight",
    r"\d+.word_embeddings.weight",
    r"tied_modules.embed.word_embeddings.weight",
    r"^module\.(?:encoder|decoder)\.layers\.\d+\.self_attention\.(?:query_key_value|dense)\.bias$",
    r"(?:.*\.)?embed_tokens\.weight",
    r"[a-z_]+\.\d{1,3}\.weight",
    r"(?:block\d{2}\.)+weight",
    r"(?!.*bias).*weight",
    r"(?i)LM_head\.weight",
    r"",
]

ENDLESS = {
    r"(a+)+b": "a",
    r"(a*)*b": "a",
    r"(?:a+)+b": "a",
    r"(?P<x>a+)+b": "a",
    r"((a+)b?)+c": "a",
    r"(a|a)*b": "a",
    r"(a|aa)+b": "a",
    r"(a|b|ab)*c": "ab",
    r"(a?){40}a{40}b": "a",
    r"(a{0,16}){0,16}b": "a",
    r"(a{1,9}){9}b": "a",
    r"(?=(a+)+b)a": "a",
    r"(?!(a+)+b)c": "a",
    r"(x)?(?(1)a|(a+)+b)": "a",
    r"(?:a?a?)*b": "a",
    r"(\w+\.?)+$": "a",
    r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)b": "a",
    ".*" * 30 + "b": "a",
    r"(a*?)*?b": "a",
    r"(((((a+){2}){2}){2}){2}){2}b": "a",
} | ({r"(?>(a+)+b)": "a", r"((a+)+b)?+c": "a"} if sys.version_info >= (3, 11) else {})


@pytest.mark.parametrize("pattern", ORDINARY)
def test_rules_take_ordinary_patterns(pattern: str) -> None:
    assert safe_pattern(pattern, "here") == pattern


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_can_run_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(UnsafeError, match="may take too long"):
        safe_pattern(pattern, "here")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|aa)+b", r"(?:a?a?)*b", ".*" * 30 + "b"])
def test_pattern_that_is_refused_would_hang(pattern: str) -> None:
    code = (
        "import re, signal; signal.setitimer(signal.ITIMER_VIRTUAL, 1)\n"
        f"re.fullmatch({pattern!r}, {ENDLESS[pattern]!r} * 60)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -signal.SIGVTALRM


@pytest.mark.parametrize("pattern", ORDINARY)
@pytest.mark.timeout(20)
def test_pattern_that_is_accepted_ends_soon_on_long_names(pattern: str) -> None:
    for name in ("a" * 400, "layers.1." * 40, "1" * 400, "." * 400, "weight" * 70):
        Rule(pattern).matches(name + "!")


def test_a_pattern_of_absurd_length_is_refused() -> None:
    with pytest.raises(UnsafeError):
        safe_pattern("a" * 1001, "here")
    with pytest.raises((UnsafeError, RulesError)):
        safe_pattern("(" * 500 + ")" * 500, "here")


def test_shipped_sets_are_rules_and_can_be_named_instead_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"megatron-core", "megatron-moe", "megatron-mamba", "hf-llama", "megatron-deepspeed"} <= set(shipped())
    monkeypatch.chdir(tmp_path)
    for name in shipped():
        assert read_rules(Path(name)) == rule_set(name) != ()
    (tmp_path / "hf-llama").write_text("[[rule]]\nmatch = 'mine'\n")
    assert read_rules(Path("hf-llama"))[0].pattern == "mine"
    with pytest.raises(NotFoundError):
        read_rules(Path("hf-lama"))


def test_rules_of_the_shipped_sets_do_not_contradict_each_other() -> None:
    """Every name of a model is matched by rules of one set only, so that their order counts nowhere."""
    names = (
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.bias",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
    )
    for name in names:
        sets = {one for one in SETS for rule in rule_set(one) if rule.matches(name)}
        assert len(sets - {"megatron-legacy"} or sets) == 1, (name, sets)


BOMBS = {
    "a key of 50,000 parts": ".".join("a" * 50_000) + " = 1",
    "a quoted key": ".".join(['"a"'] * 50_000) + " = 1",
    "a table": "[" + ".".join("a" * 50_000) + "]",
    "an inline table": "x = {" + ".".join("a" * 50_000) + " = 1}",
    "behind a text of several lines": "x = ['''\n' ''', {" + ".".join("a" * 50_000) + " = 1}, '']",
    "two mebibytes": "#" * (2 << 20),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.timeout(60)
def test_rules_that_would_exhaust_memory_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(BOMBS[kind])
    tracemalloc.start()
    try:
        with pytest.raises(UnsafeError):
            read_rules(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_rules_from_a_device_without_end_are_refused() -> None:
    with pytest.raises(UnsafeError, match="more than 1,048,576 bytes"):
        read_rules(Path("/dev/zero"))


def test_rules_may_come_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"[[rule]]\nmatch = 'layers\\..*\\.weight'  # " + b"." * 100 + b"\n")
    os.close(writing)
    try:
        assert [rule.pattern for rule in read_rules(Path(f"/dev/fd/{reading}"))] == [r"layers\..*\.weight"]
    finally:
        os.close(reading)
