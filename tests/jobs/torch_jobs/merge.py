"""Let torch's own tool make one file of each of many DCP folders: `python tests/jobs/torch_jobs/merge.py JOBS`.

JOBS is a JSON list of `{"checkpoint": folder, "out": file}`. Exits 1 if one failed; the others are done.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def merge(checkpoint: str, out: str) -> bool:
    """Whether the tool took it."""
    try:
        dcp_to_torch_save(checkpoint, out)
    except Exception as error:
        print(f"{out} FAILED: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def main() -> int:
    torch.set_num_threads(1)
    taken = [merge(**job) for job in json.loads(Path(sys.argv[1]).read_text())]
    return 0 if all(taken) else 1


if __name__ == "__main__":
    sys.exit(main())
