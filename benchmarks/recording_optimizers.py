"""The way in which optimizers are recorded, the bytes for each parameter and step, and the states that differ.

    python benchmarks/recording_optimizers.py [--steps 24] [--width 128] [-k TEXT]

Each optimizer trains a small language model of bytes, in float32 or with weights in bfloat16. The bytes are those of
the steps after the first eight; every fourth step is restored and compared with the run, bit for bit.
"""

import argparse
import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "jobs"), str(Path(__file__).parent)]

from recording import LENGTH, Model, text  # noqa: E402

from ckpt_formats.core.state_names import from_stored  # noqa: E402
from ckpt_formats.core.tensor import read  # noqa: E402
from ckpt_formats.universal.chain import chain_file, states  # noqa: E402
from ckpt_formats.universal.gradients.record import Kind  # noqa: E402
from ckpt_formats.universal.gradients.segment import open_segment  # noqa: E402
from ckpt_recorder import Recorder  # noqa: E402
from training_loops import own_optimizers as own  # noqa: E402

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
FLOAT32: dict[str, Make] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, 3e-4, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 3e-4, foreach=True),
    "AdamW amsgrad fused": lambda p: torch.optim.AdamW(p, 3e-4, amsgrad=True, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 3e-4),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 3e-4),
    "RAdam": lambda p: torch.optim.RAdam(p, 3e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 3e-4),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-4),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Muon (matrices)": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], 1e-3),
    **{
        f"own {kind.__name__}": partial(kind, lr=1e-3)
        for kind in (
            *(own.Lion, own.Adam8bit, own.HalfMoments, own.Shampoo, own.Soap, own.Prodigy, own.ScheduleFree, own.Came),
            *(own.GaLore, own.Sophia, own.Lars, own.Lamb, own.Adan, own.AdamP, own.Ademamix),
        )
    },
}
BFLOAT16: dict[str, Make] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 3e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 3e-4, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "Adam with weight decay": lambda p: torch.optim.Adam(p, 3e-4, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 3e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 3e-4),
    "Muon (matrices)": FLOAT32["Muon (matrices)"],
    "Kahan": lambda p: own.Kahan(p, 1e-3),
}


def truth_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], bytes]:
    """The bytes of all weights and of all states that are tensors."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {(name, "param"): parameter for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        tensors |= {(names[id(parameter)], k): v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
    return {
        key: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for key, tensor in tensors.items()
    }


def differing(chain: Path, step: int, truth: dict[tuple[str, str], bytes]) -> int:
    """The number of states whose bits differ from the run's, or that are missing."""
    parameters = states.open_state(chain, chain_file.read(chain), step).parameters
    count = 0
    for (name, state), expected in truth.items():
        tensor = parameters[name].states.get(from_stored(state))
        count += tensor is None or np.ascontiguousarray(read(tensor)).tobytes() != expected
    return count


def measure(make: Make, dtype: torch.dtype, width: int, steps: int, folder: Path) -> tuple[str, float, int, int]:
    """The way, bytes for each parameter and step, and how many of how many states differ."""
    torch.manual_seed(1)
    model = Model(width, 2).to(dtype)
    optimizer = make(list(model.parameters()))
    data, dice = text(), torch.Generator().manual_seed(2)
    truths: dict[int, Any] = {}
    with Recorder(model, optimizer, folder / "run.chain", random_states=False, fingerprint=0) as recorder:
        for step in range(1, steps + 1):
            at = torch.randint(len(data) - LENGTH - 1, (8,), generator=dice)
            loss = model(torch.stack([data[i : i + LENGTH + 1] for i in at]))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 0:
                truths[step] = copy.deepcopy(truth_of(model, optimizer))
        way = "update" if recorder._run.has_updates else f"replay ({recorder.exactness})"
    if recorder.broken is not None:
        raise RuntimeError(recorder.broken)
    numel = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
    nbytes = sum(map(_step_nbytes, _records(folder / "run.chain")))
    wrong = sum(differing(folder / "run.chain", step, truth) for step, truth in truths.items())
    return way, nbytes / (steps - _SKIPPED) / numel, wrong, sum(map(len, truths.values()))


_SKIPPED = 8


def _records(chain: Path) -> Iterator[Any]:
    for line in chain_file.read(chain).segments:
        for log in open_segment(chain / line.folder).logs:
            yield from (r for r in log.records if r.step > max(_SKIPPED, line.first))


def _step_nbytes(record: Any) -> int:
    return int(record.nbytes) if record.kind in (Kind.GRADIENTS, Kind.VALUES, Kind.STATE) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("-k", default="", help="only optimizers whose names contain this text")
    options = parser.parse_args()
    logging.getLogger("ckpt_recorder").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print("| weights | optimizer | way | bytes for each parameter and step | differing states |\n|---|---|---|---|---|")
    for dtype, makes in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
        for name, make in makes.items():
            if options.k.lower() in name.lower():
                with tempfile.TemporaryDirectory() as folder:
                    way, size, wrong, total = measure(make, dtype, options.width, options.steps, Path(folder))
                kind = str(dtype).removeprefix("torch.")
                print(f"| {kind} | {name} | {way} | {size:.2f} | {wrong} of {total} |", flush=True)


if __name__ == "__main__":
    main()
