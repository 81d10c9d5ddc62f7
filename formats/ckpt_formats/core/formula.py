"""Sums of products of a model's sizes: `2 * query_groups * head_dim + heads * head_dim`.

Rules state lengths as formulas, so that one rule is valid for models of every size.
Formulas come from untrusted files, so the language has nothing else.
"""

import re
from collections.abc import Mapping
from typing import Annotated

from ckpt_formats.core.arguments import Admits, Count
from ckpt_formats.core.errors import RulesError

_FORMULA = re.compile(r"[a-z0-9_]+(?: *[*+] *[a-z0-9_]+)*")
_MAX_CHARACTERS = 500
_MAX_RESULT = 1 << 62


def is_formula(value: object) -> bool:
    """Whether it is an integer >= 0, or a formula."""
    if isinstance(value, str):
        return len(value) <= _MAX_CHARACTERS and not value.isdecimal() and _FORMULA.fullmatch(value) is not None
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


Formula = Count | Annotated[str, Admits("a formula of the model's sizes", is_formula)]


def evaluate(formula: Formula, sizes: Mapping[str, int], whose: str) -> int:
    """The value of a formula. `whose`: the rule, for the message. Raises `RulesError` for a size that is not known.

    >>> evaluate("heads * 64 + 2", {"heads": 8}, "a rule")
    514
    """
    if isinstance(formula, int):
        return formula
    total = 0
    for term in formula.split("+"):
        product = 1
        for factor in map(str.strip, term.split("*")):
            if not factor.isdecimal() and factor not in sizes:
                known = f"known are {', '.join(sorted(sizes))}" if sizes else "this checkpoint states none"
                raise RulesError(f"{whose} needs the size `{factor}` of the model; {known}")
            product = min(product * (int(factor) if factor.isdecimal() else sizes[factor]), _MAX_RESULT)
        total += product
    return total
