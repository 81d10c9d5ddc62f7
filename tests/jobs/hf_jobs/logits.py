"""What transformers' models compute: `logits.py JOBS`.

Each job of the JSON list is `{"folder", "input", "logits", "report"}`: a model, the file of a batch of tokens, where to
write what it computes, and where to report which tensors transformers missed or did not expect.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        model, info = AutoModelForCausalLM.from_pretrained(
            job["folder"],
            output_loading_info=True,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        with torch.no_grad():
            torch.save(model.eval()(torch.load(job["input"])).logits, job["logits"])
        problems = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        Path(job["report"]).write_text(json.dumps({**problems, "model_type": model.config.model_type}))


if __name__ == "__main__":
    main()
