"""How long campaigns of chance are: a sample in the check, as often as CKPT_CAMPAIGN says by hand (`make campaign`)."""

import os

from hypothesis import settings

TIMES = int(os.environ.get("CKPT_CAMPAIGN") or 1)
EXAMPLES, QUICK_EXAMPLES = 60, 8
"""Of a property that asks for no other number, in the check and in `make quick`."""
QUICK_CASES = 4
"""Of a test with parameters that asks for no other number, in `make quick`."""


def examples(count: int) -> int:
    """The examples of a property that asks for `count` in the check: as many times more or fewer as others."""
    return max(1, count * settings.default.max_examples // EXAMPLES)
