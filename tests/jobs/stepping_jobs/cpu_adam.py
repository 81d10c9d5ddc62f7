"""Step parameters with DeepSpeed's operator for CPUs: `python tests/jobs/stepping_jobs/cpu_adam.py JOBS.json`.

A job has the `options` of the optimizer, the `size` of a parameter, the `rates` of its steps, how many `threads`,
before which step (`reloads`, 0: none) the optimizer is made anew from its state, and the file `out`: an npz of the
weights at the beginning, the gradients of each step, the states at the end, and the `width` of the operator's vectors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder

from engines.compiled import load
from engines.kinds import KINDS

KIND = next(kind for kind in KINDS.values() if kind.compiled == "CPUAdamBuilder")
WIDTHS = {"-D__AVX512__": 16, "-D__AVX256__": 8, "-D__NEON__": 4}


def step(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    random = torch.Generator().manual_seed(job["size"])
    weights = torch.nn.Parameter(torch.randn(job["size"], generator=random) * 0.02)
    optimizer = DeepSpeedCPUAdam([weights], lr=job["rates"][0], **job["options"])
    begin, gradients = weights.detach().numpy().copy(), []
    for count, rate in enumerate(job["rates"], 1):
        if count == job["reloads"]:
            state = optimizer.state_dict()
            optimizer = DeepSpeedCPUAdam([weights], **job["options"])
            optimizer.load_state_dict(state)
        weights.grad = torch.randn(job["size"], generator=random) * 10 ** (
            torch.rand(job["size"], generator=random) * 6 - 8
        )
        gradients.append(weights.grad.numpy().copy())
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    states = {"param": weights.detach(), **optimizer.state[weights]}
    ends = {name: states[name].numpy() for name in ("param", "exp_avg", "exp_avg_sq")}
    width = WIDTHS.get(CPUAdamBuilder().simd_width(), 0)
    np.savez(job["out"], begin=begin, gradients=np.stack(gradients), width=width, **ends)


def main() -> int:
    load(KIND)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        step(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
