"""Steps of optimizers against torch's fused ones: million parameters a second of one core, and the ratio.

    .venv/bin/python benchmarks/stepping.py [--parameters 4000000] [--rounds 15]

Both step the same values in turn; medians of processor seconds. That the bits are the same is checked after each round.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from ckpt_codecs.optimizers import Adagrad, Adam, OptimizerStep, Sgd, whole_vectors

CHUNK = 1 << 18
"""Elements of a chunk of a checkpoint: states are replayed so."""
RUNS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], OptimizerStep]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, Adam(1e-3, weight_decay=0.1)),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}, Adam(1e-3, weight_decay=0.01, amsgrad=True)),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, Sgd(1e-2, momentum=0.9)),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}, Sgd(1e-2)),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, Adagrad(1e-2)),
}


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(name: str, size: int, rounds: int) -> tuple[float, float]:
    """Million parameters a second: ours, torch's."""
    optimizer, options, step = RUNS[name]
    random = torch.Generator().manual_seed(1)
    weights = torch.nn.Parameter(torch.randn(size, generator=random) * 0.02)
    reference = optimizer([weights], fused=True, **options)
    states = {state: np.zeros(size, np.float32) for state in step.states}
    states["param"][:] = weights.detach().numpy()
    spent: tuple[list[float], list[float]] = [], []
    for count in range(1, rounds + 1):
        weights.grad = torch.randn(size, generator=random) * 1e-3
        gradients = weights.grad.numpy()

        def step_chunks(gradients: Any = gradients, count: int = count) -> None:
            for start in range(0, size, CHUNK):
                stop = min(start + CHUNK, size)
                part = {state: values[start:stop] for state, values in states.items()}
                step.apply(part, gradients[start:stop], count, whole_vectors(size, start, stop, is_fused=True))

        pair = [(step_chunks, spent[0]), (reference.step, spent[1])]
        for work, into in pair if count % 2 else pair[::-1]:
            into.append(seconds(work))
        assert np.array_equal(weights.detach().numpy(), states["param"])
    return size / median(spent[0]) / 1e6, size / median(spent[1]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=4_000_003)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'Mparam/s':16} {'ours':>7} {'torch':>7} {'ratio':>6}")
    for name in RUNS:
        speed, reference = measure(name, arguments.parameters, arguments.rounds)
        print(f"{name:16} {speed:7.0f} {reference:7.0f} {speed / reference:6.2f}")


if __name__ == "__main__":
    main()
