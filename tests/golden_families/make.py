"""Write digests of what the tables of families say of random models, once tests have shown that it is right.

    .venv/bin/python tests/golden_families/make.py

`digests.json` has one for each model of `hf_jobs.random_models`, so that no line of a table changes unnoticed, and
without transformers or Megatron core. Run the tests of names marked `engines` before it is written again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.extend(str(TESTS / folder) for folder in ("support", "jobs"))
    from family_facts import digests, facts_of_families

    (Path(__file__).parent / "digests.json").write_text(json.dumps(digests(facts_of_families()), indent=1) + "\n")


if __name__ == "__main__":
    main()
