"""What recording costs a run, and how fast its steps are done again: a GPT-like model, trained on CPU.

    python benchmarks/recording.py [--width 320] [--layers 8] [--steps 100] [--rounds 3]

Side by side, in turn, in one process: training alone; with a recorder; with `torch.save` each N steps; with DCP's
`async_save` each N steps. Then the log of the recorded steps is replayed, and restored to a folder. Ratios count; wall
times are of this machine, and say little where other programs run beside.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_recorder import Recorder
from ckpt_training.hooks import RunHook

LENGTH, ROWS, WORDS, SAVE_EVERY, PROVED = 64, 16, 256, 10, 16


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm1, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, 32)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x[:, :-1]) + self.places.weight
        for block in self.blocks:
            y = block(y)
        return nn.functional.cross_entropy(self.head(y).reshape(-1, WORDS), x[:, 1:].reshape(-1))


def text() -> torch.Tensor:
    """Bytes of source code."""
    files = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


class Training:
    """A run that goes on from one measurement to the next."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(1)
        self.model = Model(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.data, self.dice = text(), torch.Generator().manual_seed(2)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> float:
        """Train one step; its seconds."""
        began = time.perf_counter()
        at = torch.randint(len(self.data) - LENGTH - 1, (ROWS,), generator=self.dice)
        loss = self.model(torch.stack([self.data[i : i + LENGTH + 1] for i in at]))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def alone(training: Training, folder: Path, steps: int) -> Iterator[float]:
    """Nothing is saved."""
    for _ in range(steps):
        yield training.step()


def recorded(training: Training, folder: Path, steps: int) -> Iterator[float]:
    """Each step can be restored. The first steps, which are all proved, are not measured."""
    with Recorder(training.model, training.optimizer, folder / "run.chain", random_states=True):
        spent = time_hooks(training)
        for _ in range(PROVED):
            training.step()
        for _ in range(steps):
            before = spent[0]
            yield training.step()
            HOOKS.append(spent[0] - before)


HOOKS: list[float] = []
"""The seconds of all hooks of a step."""


def time_hooks(training: Training) -> list[float]:
    """The seconds that all hooks of the recorder take, as a list of one number that grows."""
    spent = [0.0]
    optimizer = training.optimizer
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        training.model._forward_pre_hooks,
    )
    for hook in (one for registry in hooks for one in registry.values() if isinstance(one, RunHook)):
        hook._hook = _timed(hook._hook, spent)
    return spent


def _timed(call: Callable[..., Any] | None, spent: list[float]) -> Callable[..., Any]:
    assert call is not None

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            spent[0] += time.perf_counter() - began

    return timed


def torch_saved(training: Training, folder: Path, steps: int) -> Iterator[float]:
    """`torch.save` each N steps."""
    for number in range(1, steps + 1):
        seconds = training.step()
        if number % SAVE_EVERY == 0:
            began = time.perf_counter()
            torch.save(training.state(), folder / "state.pt")
            seconds += time.perf_counter() - began
        yield seconds


def dcp_saved(training: Training, folder: Path, steps: int) -> Iterator[float]:
    """DCP's `async_save` each N steps; one that is not done is waited for."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    pending = None
    for number in range(1, steps + 1):
        seconds = training.step()
        if number % SAVE_EVERY == 0:
            began = time.perf_counter()
            if pending is not None:
                pending.result()
            weights, state = get_state_dict(training.model, training.optimizer)
            pending = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"dcp-{number}")
            seconds += time.perf_counter() - began
        yield seconds
    if pending is not None:
        pending.result()


MANNERS: dict[str, Callable[[Training, Path, int], Iterator[float]]] = {
    "alone": alone,
    "recorder, each step": recorded,
    f"torch.save, each {SAVE_EVERY} steps": torch_saved,
    f"DCP async_save, each {SAVE_EVERY} steps": dcp_saved,
}


def compare(training: Training, folder: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps by manner, in turn, so that a slow phase of the machine meets all."""
    import warnings

    warnings.filterwarnings("ignore")
    seconds: dict[str, list[float]] = {name: [] for name in MANNERS}
    for _ in range(rounds):
        for name, manner in MANNERS.items():
            with ExitStack() as stack:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
                seconds[name] += list(manner(training, place, max(steps // rounds, SAVE_EVERY)))
    return seconds


def replay(training: Training, folder: Path, steps: int) -> None:
    """Record, then restore: sizes and speeds."""
    for codec in ("exact", "bf16", "int8"):
        chain = folder / f"{codec}.chain"
        with Recorder(training.model, training.optimizer, chain, codec=codec, random_states=False):
            trained = sum(training.step() for _ in range(steps))
        log = json.loads(run("log", chain, "--json")[0])["segments"][0]
        print(f"{codec:8} {log['nbytes_per_parameter']:.3f} B for each parameter and step")
        _, seconds, cpu = timed("restore", chain, folder / f"{codec}.out", "--workers", "1")
        _, base_seconds, base_cpu = timed(
            "restore", f"{chain}@{log['first']}", folder / f"{codec}.base", "--workers", "1"
        )
        rate = training.numel * steps / (cpu - base_cpu) / 1e6
        print(
            f"         restored after {steps} steps in {seconds:.2f} s (of which {base_seconds:.2f} s without steps); "
            f"training them took {trained:.1f} s: {trained / max(seconds - base_seconds, 1e-9):.0f} times as long; "
            f"{rate:.0f} Mparam/s of a core, read, decoded, checked and stepped"
        )
        shutil.rmtree(chain)


def run(*arguments: object) -> tuple[str, float, float]:
    began, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "ckpt_cli", *map(str, arguments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return output, time.perf_counter() - began, cpu


def timed(*arguments: object) -> tuple[str, float, float]:
    """The output, seconds and CPU seconds of a command: the least of three runs."""
    results = []
    for _ in range(3):
        shutil.rmtree(str(arguments[2]), ignore_errors=True)
        results.append(run(*arguments))
    return results[0][0], min(one[1] for one in results), min(one[2] for one in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of training; a core is left to the writer")
    parser.add_argument("--folder", type=Path, default=None, help="where logs are written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, training = Path(name), Training(options.width, options.layers)
        print(f"{training.numel / 1e6:.1f} M parameters, {options.threads} threads, torch {torch.__version__}")
        for _ in range(5):
            training.step()
        seconds = compare(training, folder, options.steps, options.rounds)
        usual = statistics.median(seconds["alone"])
        for kind, values in seconds.items():
            mean = statistics.fmean(values) / statistics.fmean(seconds["alone"])
            print(
                f"{kind:32} median {statistics.median(values) * 1e3:7.1f} ms "
                f"({statistics.median(values) / usual:.3f}), mean {statistics.fmean(values) * 1e3:7.1f} ms ({mean:.3f})"
            )
        hook = statistics.median(HOOKS)
        print(
            f"the hooks: median {hook * 1e3:.2f} ms, {hook / usual:.2%} of a step; "
            f"mean {statistics.fmean(HOOKS) * 1e3:.2f} ms"
        )
        replay(training, folder, max(options.steps, 100))


if __name__ == "__main__":
    main()
