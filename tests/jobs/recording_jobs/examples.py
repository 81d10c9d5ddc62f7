"""Run examples: `python tests/jobs/recording_jobs/examples.py JOBS.json`, each in forks of a process that imported all.

A job has the path of a `script`, its `arguments`, how many ranks there are (`world`, 0 where none is told), and the
folder of its `logs`: what rank r prints goes to rank{r}.log. What a job starts beside its training is
forked if it runs `again`: the first one has started it as it starts for users.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("jobs", "support"))

import deepspeed
import deepspeed.ops
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import transformers.trainer
from torch.distributed.fsdp import fully_shard

from forked_writers import fork_writers

try:
    import lightning
except ImportError:
    lightning = None

deepspeed.ops.__compatible_ops__ = {}  # shared-memory collectives, which take minutes to compile
_IMPORTED = (torch._dynamo, transformers.trainer, fully_shard, lightning)


def start(job: dict[str, Any], rank: int, port: int) -> int:
    """Fork a rank; its process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(Path(job["logs"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if job.get("again"):
            fork_writers()
        if job["world"]:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world"], "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        sys.argv = [job["script"], *map(str, job["arguments"])]
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    failed = 0
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["logs"]).mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [start(job, rank, port) for rank in range(job["world"] or 1)]
        ended = [os.waitpid(pid, 0)[1] for pid in ranks]
        if any(ended):
            failed += 1
            print(f"{job['script']} FAILED: {(Path(job['logs']) / 'rank0.log').read_text()[-4000:]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
