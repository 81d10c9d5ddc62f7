"""Let DeepSpeed's own converter make universal folders, of any number of checkpoints in one process.

`python tests/jobs/engines/to_universal.py JOBS`: a JSON list of `[folder of a step, folder to write, log]`. What the
converter says, and how it failed if it did, goes to the log, a JSON object; a failure is a result.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from deepspeed.checkpoint import ds_to_universal

OPTIONS = {
    "num_extract_workers": 1,
    "num_merge_workers": 1,
    "keep_temp_folder": False,
    "strict": True,
    "inject_missing_state": True,
}


def convert(step: Path, out: Path) -> str | None:
    """How the conversion failed; None if it did not."""
    try:
        ds_to_universal.main(Namespace(input_folder=str(step), output_folder=str(out), **OPTIONS))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def main() -> None:
    torch.set_num_threads(1)
    for step, out, log in json.loads(Path(sys.argv[1]).read_text()):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            failure = convert(Path(step), Path(out))
        Path(log).write_text(json.dumps({"failure": failure, "said": output.getvalue()[-2000:]}))


if __name__ == "__main__":
    main()
