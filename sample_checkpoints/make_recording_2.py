"""Write the golden log of layout version 2: `python sample_checkpoints/make_recording_2.py`, with torch.

`recorded-2/run.chain` is a run of two ranks under DDP as the recorder wrote it: AdamW is replayed; an optimizer of its
own class on bfloat16 weights, which steps in every third iteration, is recorded as updates. Between steps the run clips
weights, zeroes a moment, loses a state, moves a frozen teacher and draws random numbers. A step is skipped. A tensor
that no optimizer steps gets one, which begins a second segment. `recorded-2/expected.json` has for each step the
XXH3-128 of the weights and states of each tensor and of the random states of each rank, computed from those of torch.
A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_recorder import Recorder

TARGET = Path(__file__).resolve().parent / "recorded-2"
ITERATIONS, LATE = 18, 17
"""How many there are; and the one before which `late` gets an optimizer."""
CLIPPED, SKIPPED, ZEROED, SCALED, CLEARED = 3, 5, 6, 7, 8


class Seen(nn.Module):
    """With an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        return values

    def get_extra_state(self) -> Any:
        return {"batches": self.batches}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 9, dtype=torch.bfloat16)
        self.late = nn.Parameter(torch.linspace(0.5, 1.5, 9))
        self.teacher = nn.Embedding(11, 7).requires_grad_(False)
        self.seen = Seen()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values = nn.functional.dropout(self.norm(self.table(rows)) + self.teacher(rows), 0.1, self.training)
        result: torch.Tensor = self.seen(self.head(values.bfloat16()).float() * self.late)
        return result


class RowMomentum(torch.optim.Optimizer):
    """With states of bfloat16, of another shape than the weights, and of a plain number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state, gradient = self.state[one], one.grad
                state["calls"] = state.get("calls", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(one))
                rows = state.setdefault("rows", torch.zeros(one.shape[0]))
                momentum.lerp_(gradient, 0.25)
                rows.add_(gradient.float().reshape(len(rows), -1).square().mean(1))
                one.sub_(momentum / (rows + 1e-4).sqrt().reshape(-1, *[1] * (one.dim() - 1)).bfloat16() * group["lr"])


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """The XXH3-128 of tensors, in the order of their names. States of zeros need not be there, so they do not count."""
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        if name == "param" or tensors[name].any():
            hasher.update(tensors[name].detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def expected(net: Net, optimizers: list[torch.optim.Optimizer], step: int) -> dict[str, Any]:
    """What must be restored of this rank's copies."""
    tensors, counts = dict[str, str](), dict[str, Any]()
    for name, tensor in net.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        states = next((one.state[tensor] for one in optimizers if tensor in one.state), {})
        counts[name] = float(states.get("step", states.get("calls", 0)))
        same = {key: one for key, one in states.items() if isinstance(one, torch.Tensor) and key != "step"}
        tensors[name] = digest({"param": tensor, **same})
    generators = [torch.get_rng_state().numpy(), np.array(random.getstate()[1], np.uint32)]
    rates = [group["lr"] for one in optimizers for group in one.param_groups]
    drawn = [xxhash.xxh3_128_hexdigest(one.tobytes()) for one in generators]
    return {
        "step": step,
        "tensors": tensors,
        "counts": counts,
        "rates": rates,
        "random": drawn,
        "batches": net.seen.batches,
    }


def train(net: Net, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Yield after each step, when all that belongs to it is done; for some steps once more, after a change."""
    model = DistributedDataParallel(net)
    adam, own = optimizers
    for turn in range(ITERATIONS):
        if turn == LATE:
            adam.add_param_group({"params": [net.late], "weight_decay": 0.0})
            yield
        rows = torch.randint(11, (6,))
        model.zero_grad()
        nn.functional.cross_entropy(model(rows), torch.randint(9, (6,))).backward()
        if turn == SCALED:
            with torch.no_grad():
                net.table.weight.mul_(0.5)
        if turn == SKIPPED:
            adam.found_inf = torch.tensor(1.0)  # as a gradient scaler sets it
            adam.step()
            del adam.found_inf
            yield
        adam.step()
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] *= 0.97
        if turn % CLIPPED == 0:
            with torch.no_grad():
                net.table.weight.clamp_(-0.5, 0.5)
        if turn == ZEROED:
            adam.state[net.table.weight]["exp_avg"].zero_()
        yield
        if turn % 3 == 2:
            own.step()
            with torch.no_grad():
                net.teacher.weight.lerp_(net.table.weight, 0.1)
            if turn == CLEARED:
                del own.state[net.head.bias]
            random.random()
            yield


def record(rank: int, work: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{work}/meeting", rank=rank, world_size=2)
    torch.manual_seed(1)
    net = Net()
    nn.init.uniform_(net.late, 0.5, 1.5)
    torch.manual_seed(10 + rank)
    random.seed(10 + rank)
    adam = torch.optim.AdamW([net.table.weight, net.norm.weight, net.norm.bias], lr=1e-2, fused=True)
    optimizers: list[torch.optim.Optimizer] = [adam, RowMomentum(net.head.parameters())]
    with Recorder(net, optimizers, work / "run.chain", fingerprint=5) as recorder:
        wanted = {0: expected(net, optimizers, 0)}
        for _ in train(net, optimizers):
            step = recorder.step
            recorder.note(schedule={"last": step, "warm": (1, 2)}, seen=np.int64(step * 6))
            wanted[step] = expected(net, optimizers, step)
    (work / f"expected-{rank}.json").write_text(json.dumps(list(wanted.values())))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        multiprocessing.spawn(record, (work,), nprocs=2)
        wanted, others = (json.loads((work / f"expected-{rank}.json").read_text()) for rank in range(2))
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(work / "run.chain", TARGET / "run.chain")
    for one, other in zip(wanted, others, strict=True):
        one["random"] = [one["random"], other["random"]]
        assert one["tensors"]["table.weight"] == other["tensors"]["table.weight"]
    lines = ",\n".join(json.dumps(one) for one in wanted)
    (TARGET / "expected.json").write_text(f"[\n{lines}\n]\n")
    nbytes = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET.name}: {len(wanted)} steps, {nbytes:,} bytes")


if __name__ == "__main__":
    main()
