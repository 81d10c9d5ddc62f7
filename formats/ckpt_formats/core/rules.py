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

import re
import sys
import warnings
from math import inf
from pathlib import Path
from typing import Any, get_args

from ckpt_formats.core.errors import CkptError, RulesError, UnsafeError
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.formula import is_formula
from ckpt_formats.core.layout import ParallelGroup, Partitioning, Rule

if sys.version_info >= (3, 11):
    from re import _parser as regex_parser  # type: ignore[attr-defined]
else:
    import sre_parse as regex_parser

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
_SETS = Path(__file__).parent / "rule_sets"
_MAX_PATTERN = 1000
_MAX_BACKTRACKS = 1e8
"""The count of four open repeats in a row."""


def shipped() -> tuple[str, ...]:
    """The names of the rule sets that come with ckpt."""
    return tuple(sorted(file.stem for file in _SETS.glob("*.toml")))


def rule_set(name: str) -> tuple[Rule, ...]:
    """The rules of a set that comes with ckpt."""
    return _read(_SETS / f"{name}.toml", f"set {name}")


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
        tables = tomllib.loads(path.read_text("utf-8"))
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, and numbers without end
        raise RulesError(f"not a TOML file: {error}", where=path) from None
    unknown = set(tables) - {"rule"}
    if unknown or not isinstance(tables.get("rule"), list):
        raise RulesError("expected only [[rule]] tables", where=path, hint="See docs/rules.md for the language.")
    return tuple(_rule(table, f"{origin}, rule {i}") for i, table in enumerate(tables["rule"], 1))


def safe_pattern(pattern: str, origin: str) -> str:
    """The pattern itself, if a match always ends in reasonable time.

    Rules are stored in checkpoints, so they are untrusted input: a choice within a
    repeat can take time exponential in the length of a name, and many repeats in a
    row nearly as much. Raises `RulesError` for what is no regular expression, `UnsafeError`
    for one that could take too long.
    """
    if len(pattern) > _MAX_PATTERN:
        raise UnsafeError(f"a name pattern of {len(pattern)} characters", where=origin)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = regex_parser.parse(pattern)
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RulesError(f"`{pattern}` is not a regular expression: {error}", where=origin) from None
    if _count_backtracks(parsed) > _MAX_BACKTRACKS:
        raise UnsafeError(
            f"the pattern `{pattern}` has too many choices: a match may take too long",
            where=origin,
            hint="Write it without a repeat within a repeat.",
        )
    return pattern


def _rule(table: Any, where: str) -> Rule:
    if not isinstance(table, dict) or not isinstance(table.get("match"), str):
        raise RulesError(
            "a rule needs `match`, a regular expression",
            where=where,
            hint="Such as: match = 'mlp\\.up\\.weight$', and axis = 0.",
        )
    if unknown := set(table) - _KEYS:
        raise RulesError(f"unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(_KEYS))}", where=where)
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


def _count_backtracks(parsed: Any, repeated: bool = False) -> float:
    """How often the matcher may try again on a name of 100 characters; infinite for a choice within a repeat."""
    total = 1.0
    for op, argument in parsed:
        name, count = str(op), 1.0
        if name.endswith("_REPEAT"):
            low, high, inner = argument
            count = min(high - low + 1, 100) * _count_backtracks(inner, repeated or high > 1)
        elif name == "SUBPATTERN":
            total *= _count_backtracks(argument[3], repeated)
        elif name == "ATOMIC_GROUP":
            total *= _count_backtracks(argument, repeated)
        elif name in ("ASSERT", "ASSERT_NOT"):
            total *= _count_backtracks(argument[1], repeated)
        elif name in ("BRANCH", "GROUPREF_EXISTS"):
            branches = argument[1] if name == "BRANCH" else argument[1:]
            count = sum(_count_backtracks(branch, repeated) for branch in branches if branch is not None)
        total *= inf if repeated and count > 1 else count
    return total
