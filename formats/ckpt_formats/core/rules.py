"""Rules from TOML files: the small language in which a user states how tensors are sharded.

[[rule]]
match = 'layers\\.\\d+\\.attn\\.qkv\\.weight'   # a regular expression for the whole name
axis = 0
fused = [64, 32, 32]        # full lengths of q, k and v; or a count of equal parts

[[rule]]
match = '.*norm.*'
how = "replicated"          # or "averaged", "first"

[[rule]]
match = 'embed\\.weight'
vocabulary = 50257          # rows beyond are padding

[[rule]]
match = '.*fc1\\.weight'
when = "gated"              # only for models with this size
fused = ["ffn", "ffn"]      # formulas of the sizes that the checkpoint states
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from ckpt_formats.core.arguments import Admits, LocalPath, as_path
from ckpt_formats.core.errors import CkptError, RulesError, UnsafeError
from ckpt_formats.core.files import read_settings
from ckpt_formats.core.formula import is_formula
from ckpt_formats.core.layout import ParallelGroup, Partitioning, Rule
from ckpt_formats.core.name_patterns import check_pattern

_KEYS = {
    "match",
    "how",
    "axis",
    "fused",
    "widths",
    "vocabulary",
    "length",
    "units",
    "padded",
    "over",
    "when",
}
_MAX_NBYTES = 1 << 20
_MAX_DOTS = 64
"""Dots in a line that are in no string. A dotted key takes memory that grows with the square of its parts."""
_STRINGS = re.compile(r"""'[^'\n]*'|"(?:[^"\\\n]|\\.)*"|#[^\n]*""")
_SETS = Path(__file__).parent / "rule_sets"


def shipped() -> tuple[str, ...]:
    """The names of the rule sets that come with ckpt."""
    return tuple(sorted(file.stem for file in _SETS.glob("*.toml")))


def rule_set(name: str) -> tuple[Rule, ...]:
    """The rules of a set that comes with ckpt."""
    return _read(_SETS / f"{name}.toml", f"set {name}")


def rules_of(rules: LocalPath | Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules as arguments of functions give them: a TOML file, the name of a shipped set, or the rules themselves."""
    return read_rules(as_path(rules)) if isinstance(rules, (str, os.PathLike)) else tuple(rules)


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a TOML file, in order, or of a shipped set. Raises `RulesError` naming the rule that is wrong."""
    if not path.exists() and str(path) in shipped():
        return rule_set(str(path))
    return _read(path, str(path))


def _read(path: Path, origin: str) -> tuple[Rule, ...]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = read_settings(path, _MAX_NBYTES).decode("utf-8")
        _check_keys(text, path)
        tables = tomllib.loads(text)
    except CkptError:
        raise
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, and numbers without end
        raise RulesError(f"not a TOML file: {error}", where=path) from None
    unknown = set(tables) - {"rule"}
    if unknown or not isinstance(tables.get("rule"), list):
        raise RulesError("expected only [[rule]] tables", where=path, hint="See docs/rules.md for the language.")
    return tuple(_rule(table, f"{origin}, rule {i}") for i, table in enumerate(tables["rule"], 1))


def _check_keys(text: str, path: Path) -> None:
    """Raise `UnsafeError` for keys of many parts, before the parser of TOML takes memory for them."""
    several_lines = "'''" in text or '"""' in text  # then, where a string ends is not seen in one line
    outside = text if several_lines else _STRINGS.sub("_", text)
    for number, line in enumerate(outside.splitlines(), 1):
        if line.count(".") > _MAX_DOTS:
            raise UnsafeError(f"line {number} has a key of too many parts", where=path)


def safe_pattern(pattern: str, origin: str) -> str:
    """The pattern itself, if it is a regular expression that can be matched in reasonable time.

    Raises `RulesError` or `UnsafeError`; see `name_patterns.check_pattern`.
    """
    check_pattern(pattern, origin)
    return pattern


def _is_pattern(text: str) -> bool:
    try:
        return bool(safe_pattern(text, "") == text)
    except CkptError:
        return False


Pattern = Annotated[str, Admits("a regular expression that is matched in reasonable time", _is_pattern)]
"""A text that is searched in the names of parameters."""


def _rule(table: Any, where: str) -> Rule:
    if not isinstance(table, dict) or not isinstance(table.get("match"), str):
        raise RulesError(
            "a rule needs `match`, a regular expression",
            where=where,
            hint="Such as: match = 'mlp\\.up\\.weight$', and axis = 0.",
        )
    if unknown := set(table) - _KEYS:
        raise RulesError(f"unknown key {sorted(unknown)[0]!r}; the keys are {', '.join(sorted(_KEYS))}", where=where)
    how = table.get("how", "sharded")
    if how not in get_args(Partitioning) or how == "blocks":
        raise RulesError(f"`how` is {how!r}, but must be sharded, replicated, averaged, first or unique", where=where)
    axis, fused, vocabulary = table.get("axis", 0), table.get("fused", 1), table.get("vocabulary")
    widths = table.get("widths", [])
    if not _natural(axis) or not (vocabulary is None or _natural(vocabulary)):
        raise RulesError("`axis` and `vocabulary` are whole numbers from 0", where=where)
    if not (_natural(fused) and fused) and not (isinstance(fused, list) and fused and all(map(is_formula, fused))):
        raise RulesError("`fused` is a count of parts, or the list of their lengths", where=where)
    for key in ("length", "units", "when"):
        if not is_formula(table.get(key, 0)) or (key == "when" and not isinstance(table.get(key, ""), str)):
            raise RulesError(f"`{key}` is a formula of sizes, such as 'heads * head_dim + 2'", where=where)
    over, padded = table.get("over", "tensor"), table.get("padded", False)
    if over not in get_args(ParallelGroup) or not isinstance(padded, bool):
        raise RulesError("`over` is tensor or expert, `padded` is true or false", where=where)
    if not isinstance(widths, list) or not all(isinstance(w, list) and all(map(_natural, w)) for w in widths):
        raise RulesError("`widths` is a list of lists: for each part, its lengths on each rank", where=where)
    return Rule(
        safe_pattern(table["match"], where),
        how,
        axis,
        tuple(fused) if isinstance(fused, list) else fused,
        tuple(tuple(w) for w in widths),
        vocabulary,
        origin=where,
        length=table.get("length"),
        units=table.get("units"),
        padded=padded,
        over=over,
        when=table.get("when"),
    )


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
