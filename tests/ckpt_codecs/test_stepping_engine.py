"""Steps against the operator that DeepSpeed compiles for CPUs: no differing bit."""

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_codecs.optimizers import DeepSpeedCpuAdam, whole_vectors
from engines import launch
from engines.kinds import COMPILER

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not COMPILER, reason="the operator is compiled by a C++ compiler"),
]

SCRIPT = Path(__file__).parents[1] / "jobs" / "stepping_jobs" / "cpu_adam.py"
STEPS = 12
OPTIONS = [
    {"weight_decay": decay, "eps": eps, "adamw_mode": decoupled, "bias_correction": corrected, "betas": betas}
    for (decay, eps), decoupled, corrected, betas in product(
        ((0.0, 1e-8), (0.1, 1e-6)), (True, False), (True, False), ((0.9, 0.95), (0.9, 0.999), (0.5, 0.9))
    )
]
SIZES = [*range(1, 101), 1003, 65_539]


def job(size: int, options: dict[str, Any], threads: int = 1, reloads: int = 0, steps: int = STEPS) -> dict[str, Any]:
    rates = [1e-3 * (count - 1) / 7 for count in range(1, steps + 1)]
    return {"size": size, "options": options, "threads": threads, "reloads": reloads, "rates": rates}


def jobs() -> list[dict[str, Any]]:
    """All sizes, all options, two threads, reloaded at several steps, and so many steps that powers come to nothing."""
    return [
        *(job(size, OPTIONS[size % len(OPTIONS)]) for size in SIZES),
        *(job(131, options) for options in OPTIONS),
        *(job(65_539, options, threads=2) for options in OPTIONS[::5]),
        *(job(131, options, reloads=reloads) for options in OPTIONS[::5] for reloads in (2, 7)),
        *(job(37, options, steps=400) for options in OPTIONS[::7]),
    ]


def test_deepspeeds_adam_has_the_bits_of_its_operator(tmp_path: Path) -> None:
    listed = [one | {"out": str(tmp_path / f"{i}.npz")} for i, one in enumerate(jobs())]
    (tmp_path / "jobs.json").write_text(json.dumps(listed))
    launch.run_script(SCRIPT, [str(tmp_path / "jobs.json")], 1)
    for one in listed:
        with np.load(one["out"]) as arrays:
            assert differing(one, dict(arrays)) == 0, one


def differing(one: dict[str, Any], arrays: dict[str, np.ndarray]) -> int:
    """How many values differ after the steps of a job, which are done in pieces."""
    size, width = one["size"], int(arrays["width"])
    step = DeepSpeedCpuAdam(0.0, **one["options"])
    states = {name: np.zeros(size, np.float32) for name in step.states}
    states["param"][:] = arrays["begin"]
    for count, (rate, gradients) in enumerate(zip(one["rates"], arrays["gradients"], strict=True), 1):
        now = replace(step, lr=rate, powers_from=one["reloads"] if count >= one["reloads"] else 0)
        for start, stop in pairwise(sorted({0, size // 3, size - size % 5, size})):
            part = {name: state[start:stop] for name, state in states.items()}
            vectors = whole_vectors(size, start, stop, is_fused=True, width=width) if width else 0
            now.apply(part, gradients[start:stop], count, vectors)
    return sum(
        int(np.count_nonzero(state.view(np.uint32) != arrays[name].view(np.uint32))) for name, state in states.items()
    )
