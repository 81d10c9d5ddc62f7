"""Names in the source: no words that are not terms of the field, and no class name with two meanings.

A name states what the value is, by the term of the field (`docs/make_architecture.py` lists the nouns). The words below
do not.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ckpt_cli", "codecs", "formats")
TESTS = ("benchmarks", "tests")

BANNED = frozenset(
    [
        "asked",
        "begun",
        "beside",
        "borrow",
        "carried",
        "doubts",
        "drifted",
        "faded",
        "flaws",
        "foretell",
        "foretells",
        "foretold",
        "gone",
        "halves",
        "heed",
        "heeding",
        "held",
        "joint",
        "kept",
        "lanes",
        "lent",
        "looks",
        "lost",
        "made",
        "manner",
        "ours",
        "respelled",
        "said",
        "seldom",
        "settle",
        "settled",
        "spelled",
        "strays",
        "theirs",
        "told",
        "worths",
    ]
)
"""Participles that stand for things, adverbs, metaphors."""

BANNED_IN_TESTS = frozenset(["asked", "made", "said", "told"])

NO_SUBJECTS = frozenset(
    [
        *("what", "whatever", "whichever", "who", "whoever", "whose", "where", "when", "if", "because", "as", "so"),
        *("it", "there", "one", "both", "either", "neither", "some", "more", "most", "others", "nothing", "nobody"),
        *("only", "even", "of", "with", "without", "in", "from", "at", "after", "by", "on", "to", "for"),
    ]
)
"""The first words of names of tests that do not say which thing is tested: `test_<subject>_<does what>`."""

MAX_FOUND = {PACKAGES: 0, TESTS: 20}
"""What is found has a name of its own: a match, an entry, blocks."""

SAME_IN_TWO_ENGINES = {
    "Folder": {"deepspeed", "fsdp_ranks", "hf"},
    "LayoutOptions": {"deepspeed", "megatron"},
    "OptimizerStates": {"deepspeed", "megatron"},
    "RankFile": {"fsdp_ranks", "megatron"},
    "RankState": {"deepspeed", "megatron"},
    "WriteLayout": {"deepspeed", "megatron"},
}
"""Classes that are the same thing in several engines: the only ones that may share a name."""


@cache
def trees(folders: tuple[str, ...] = PACKAGES) -> dict[Path, ast.Module]:
    """The syntax trees of all modules in these folders, by path relative to the repository."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every use of an identifier, without leading underscores: pairs of its line and the name."""
    for node in ast.walk(tree):
        for field in node._fields:
            name = getattr(node, field, None) if field in _NAMES else None
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name.lstrip("_")


_NAMES = frozenset(["id", "attr", "arg", "name", "asname", "rest"])
"""The fields of nodes that are identifiers."""


WORDS = BANNED | BANNED_IN_TESTS | {"found"}


@cache
def uses_of_words(folders: tuple[str, ...]) -> dict[str, list[str]]:
    """Where each of `WORDS` is used as an identifier in these folders: `path:line`, by word. One walk for all tests."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees(folders).items():
        for line, name in identifiers(tree):
            if name in WORDS:
                places[name].append(f"{path}:{line}")
    return places


@pytest.mark.parametrize(("words", "folders"), [(BANNED, PACKAGES), (BANNED_IN_TESTS, TESTS)], ids=["code", "tests"])
def test_no_identifier_is_one_of_the_banned_words(words: frozenset[str], folders: tuple[str, ...]) -> None:
    used = {word: uses for word, uses in uses_of_words(folders).items() if word in words}
    assert not used, "\n".join(f"{word}: {' '.join(uses)}" for word, uses in used.items())


@pytest.mark.parametrize("folders", [PACKAGES, TESTS], ids=["code", "tests"])
def test_found_is_only_the_result_of_a_search(folders: tuple[str, ...]) -> None:
    uses = uses_of_words(folders).get("found", [])
    files = Counter(use.partition(":")[0] for use in uses)
    assert len(uses) <= MAX_FOUND[folders], f"{len(uses)} uses: {files.most_common(20)}"


def test_names_of_tests_begin_with_what_is_tested() -> None:
    names = {
        f"{path}:{node.lineno} {node.name}": node.name.split("_")
        for path, tree in trees(TESTS).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and path.name.startswith("test_") and "ckpt_recorder" not in path.parts
    }
    wrong = [place for place, (first, *rest) in names.items() if first == "test" and rest and rest[0] in NO_SUBJECTS]
    assert not wrong, "\n".join(wrong)


def test_no_two_classes_share_a_name_unless_they_are_the_same_in_two_engines() -> None:
    paths: dict[str, list[Path]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                paths[node.name].append(path)
    shared = {name: places for name, places in paths.items() if len(places) > 1}
    wrong = {name: places for name, places in shared.items() if engines_of(places) != SAME_IN_TWO_ENGINES.get(name)}
    assert not wrong, wrong
    assert shared.keys() == SAME_IN_TWO_ENGINES.keys()


def engines_of(paths: list[Path]) -> set[str] | None:
    """The engines of these modules; None if one is of no engine, or if two are of the same."""
    matches = [re.search(r"ckpt_formats/engines/(\w+)/", path.as_posix()) for path in paths]
    names = {match[1] for match in matches if match is not None}
    return names if len(names) == len(paths) else None
