"""Names in the source: no words that are not terms of the field, and no class name with two meanings.

A name states what the value is, by the term of the field (`docs/make_architecture.py` lists the nouns). The words below
do not.
"""

import ast
import gc
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
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


WORDS = BANNED | BANNED_IN_TESTS | {"found"}
_NAMES = frozenset(["id", "attr", "arg", "name", "asname", "rest"])
"""The fields of syntax nodes that are identifiers."""


@dataclass(frozen=True)
class Names:
    """The names in folders that tests judge."""

    words: defaultdict[str, list[str]]
    """Where each of `WORDS` is used as an identifier, but for leading underscores: `path:line`, by word."""
    classes: defaultdict[str, list[Path]]
    """The modules of each class, by its name."""
    functions: dict[str, Path]
    """The modules of functions, by `path:line name`."""


@cache
def names_in(folders: tuple[str, ...]) -> Names:
    """The names of all modules in these folders, by paths relative to the repository.

    No syntax tree stays, and none is looked for garbage: they have a million nodes.
    """
    names = Names(defaultdict(list), defaultdict(list), {})
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
            _add_names(names, path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8")))
    finally:
        if was_enabled:
            gc.enable()
    return names


def _add_names(names: Names, path: Path, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        for field in node._fields:
            name = getattr(node, field, None) if field in _NAMES else None
            if isinstance(name, str) and name.lstrip("_") in WORDS:
                names.words[name.lstrip("_")].append(f"{path}:{getattr(node, 'lineno', 0)}")
        if isinstance(node, ast.ClassDef):
            names.classes[node.name].append(path)
        elif isinstance(node, ast.FunctionDef):
            names.functions[f"{path}:{node.lineno} {node.name}"] = path


@pytest.mark.parametrize(("words", "folders"), [(BANNED, PACKAGES), (BANNED_IN_TESTS, TESTS)], ids=["code", "tests"])
def test_no_identifier_is_one_of_the_banned_words(words: frozenset[str], folders: tuple[str, ...]) -> None:
    used = {word: uses for word, uses in names_in(folders).words.items() if word in words}
    assert not used, "\n".join(f"{word}: {' '.join(uses)}" for word, uses in used.items())


@pytest.mark.parametrize("folders", [PACKAGES, TESTS], ids=["code", "tests"])
def test_found_is_only_the_result_of_a_search(folders: tuple[str, ...]) -> None:
    uses = names_in(folders).words["found"]
    files = Counter(use.partition(":")[0] for use in uses)
    assert len(uses) <= MAX_FOUND[folders], f"{len(uses)} uses: {files.most_common(20)}"


def test_names_of_tests_begin_with_what_is_tested() -> None:
    names = {
        place: place.rpartition(" ")[2].split("_")
        for place, path in names_in(TESTS).functions.items()
        if path.name.startswith("test_") and "ckpt_recorder" not in path.parts
    }
    wrong = [place for place, (first, *rest) in names.items() if first == "test" and rest and rest[0] in NO_SUBJECTS]
    assert not wrong, "\n".join(wrong)


def test_no_two_classes_share_a_name_unless_they_are_the_same_in_two_engines() -> None:
    shared = {name: places for name, places in names_in(PACKAGES).classes.items() if len(places) > 1}
    wrong = {name: places for name, places in shared.items() if engines_of(places) != SAME_IN_TWO_ENGINES.get(name)}
    assert not wrong, wrong
    assert shared.keys() == SAME_IN_TWO_ENGINES.keys()


def engines_of(paths: list[Path]) -> set[str] | None:
    """The engines of these modules; None if one is of no engine, or if two are of the same."""
    matches = [re.search(r"ckpt_formats/engines/(\w+)/", path.as_posix()) for path in paths]
    names = {match[1] for match in matches if match is not None}
    return names if len(names) == len(paths) else None
