"""Let transformers load folders: `python tests/jobs/hf_jobs/load.py JOBS`.

Each job of the JSON list is `{"folder", "truth", "report"}`; the report says what transformers missed, and whether
the model computes the same as the one in `truth`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM

from hf_jobs.make import truth_of


def load(folder: str, truth: str) -> dict[str, Any]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    actual, expected = truth_of(model), torch.load(truth)
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": [list(map(str, key)) for key in info["mismatched_keys"]],
        "unlike": sorted(
            name
            for name in actual["state"].keys() | expected["state"].keys()
            if not (name in actual["state"] and name in expected["state"])
            or not torch.equal(actual["state"][name], expected["state"][name])
            or actual["state"][name].dtype != expected["state"][name].dtype
        ),
        "logits": torch.equal(actual["logits"], expected["logits"]),
    }


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["report"]).write_text(json.dumps(load(job["folder"], job["truth"])))


if __name__ == "__main__":
    main()
