"""A recorded run of a loop: what it had after each of its steps, and the small models that loops train."""

import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_recorder import Recorder, RecorderWarning

STEPS = 9
"""One more than a power of two, so that the last step lies after a proof."""

Leaves = dict[str, Any]
"""Tensors and plain values by path."""


class SkipLoop(Exception):
    """The loop cannot run on this machine."""


@dataclass(frozen=True)
class Truth:
    """All that a run had at one moment."""

    model: Leaves
    """The model's `state_dict`, flattened: weights, buffers and extra states."""
    optimizer: Leaves
    """The states of all optimizers by `name|path`, as their `state_dict` has them."""
    options: list[Leaves]
    """The options of all parameter groups."""
    random: Leaves
    """The states of the random number generators of torch, NumPy and Python."""
    notes: Leaves
    names: frozenset[str]
    """The names of parameters and persistent buffers: all others of `model` are computed, or extra states."""


@dataclass
class Run:
    """What a loop records, and what it had."""

    chain: Path
    truths: dict[int, Truth] = field(default_factory=dict)
    others: dict[int, Truth] = field(default_factory=dict)
    """Of some steps, what the run had a little later: then the restored step may be either."""
    model: Any = None
    optimizers: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    recorder: Any = None
    checks_random: bool = True
    """False in loops that draw random numbers after their steps, and do not note that."""
    sets_rates_first: bool = False
    """The loop sets the options of a step just before it: the state of the step before may have both."""
    resumes: bool = True
    """False if the objects of the loop's end are not those that load one of its steps."""
    expects_warning: bool = False
    """Steps were taken that the recorder did not count: it must say so."""
    _random: Leaves | None = None
    _notes: Leaves = field(default_factory=dict)

    @contextmanager
    def record(self, model: Any, optimizer: Any, **options: Any) -> Iterator[Any]:
        """Record until the block ends; its start is step 0, or what the recorder says."""
        self.start(model, optimizer, **options)
        with self.recorder as recorder:
            yield recorder

    def steps(self, model: Any, optimizer: Any, count: int = STEPS, **options: Any) -> Iterator[int]:
        """Record so many iterations: yields the number of each before it, and has its truth after it."""
        with self.record(model, optimizer, **options):
            for step in range(count):
                yield step
                self.after()

    def start(self, model: Any, optimizer: Any, **options: Any) -> Any:
        """Start to record. The loop closes the recorder itself, or does not."""
        self.model = model
        self.optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.recorder = None
        self.chain = Path(options.get("chain", self.chain)).absolute()
        with self.listening():
            self.recorder = Recorder(model, optimizer, options.pop("chain", self.chain), **options)
        self.after()
        return self.recorder

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect what the recorder warns of. Other warnings do not matter here."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                self.warnings += [str(one.message) for one in caught if issubclass(one.category, RecorderWarning)]

    def note(self, **items: Any) -> None:
        """Note values after the last step. The random states of this moment belong to it."""
        self.recorder.note(**items)
        self._random = random_leaves()
        self._notes = flat({name: _stated(item) for name, item in items.items()})

    def after(self) -> None:
        """An iteration has ended: this is the truth of its step."""
        noted, self._random = self._random, None
        notes, self._notes = self._notes, {}
        step = self.recorder.step
        self.truths[step] = truth_of(self.model, self.optimizers, noted or random_leaves(), notes)

    def also(self) -> None:
        """The next iteration has changed something before its step: the state of the step before may have that."""
        self.others[self.recorder.step] = truth_of(self.model, self.optimizers, random_leaves(), {})

    def save(self) -> None:
        """Save the truths and warnings, for a process that continues after this one was killed."""
        with open(self.chain.with_suffix(".truths"), "wb") as file:
            pickle.dump((self.truths, self.warnings), file)

    def in_child(self, work: Callable[[], Any]) -> None:
        """Run `work` in a process of its own, which may end in any way after `save`. It is followed until it ends."""
        pid = os.fork()
        if pid == 0:
            try:
                with self.listening():
                    work()
            finally:
                os._exit(9)
        os.waitpid(pid, 0)
        with open(self.chain.with_suffix(".truths"), "rb") as file:
            self.truths, self.warnings = pickle.load(file)


def truth_of(model: nn.Module, optimizers: list[Any], random_states: Leaves, notes: Leaves) -> Truth:
    """Copies of all values."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    states: Leaves = {}
    options = []
    for number, optimizer in enumerate(optimizers):
        content = optimizer.state_dict()
        groups = optimizer.param_groups
        order = [names.get(id(p), f"?{i}") for i, p in enumerate(p for group in groups for p in group["params"])]
        for key, state in content["state"].items():
            name = order[key] if isinstance(key, int) and key < len(order) else str(key)
            states |= {f"{number}:{name}|{path}": leaf for path, leaf in flat(state).items()}
        others = {key: value for key, value in content.items() if key not in ("state", "param_groups")}
        states |= {f"{number}:~|{path}": leaf for path, leaf in flat(others).items()}
        for group in groups:
            plain = {key: value for key, value in group.items() if key != "params" and not callable(value)}
            options.append(flat(plain))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return Truth(
        flat(model.state_dict()), states, options, random_states, notes, frozenset(name for name, _ in tensors)
    )


def random_leaves() -> Leaves:
    return flat({"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1:], "python": random.getstate()[1:]})


def flat(value: Any, path: str = "") -> Leaves:
    """The leaves of nested values, each by its path. Tensors are copied."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # a quantised state
            return flat({name: getattr(value, name) for name in value.__tensor_flatten__()[0]}, path)
        # A copy by NumPy's view would miss types that it lacks.
        return {path: value.detach().to("cpu", copy=True).contiguous() if value.device.type != "meta" else "meta"}
    if isinstance(value, np.ndarray):
        return {path: value.copy()}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)) and not all(isinstance(one, (int, float)) for one in value):
        items = enumerate(value)
    else:
        return {path: tuple(value) if isinstance(value, list) else value}
    return {p: leaf for key, one in items for p, leaf in flat(one, f"{path}/{key}" if path else str(key)).items()}


def _stated(item: Any) -> Any:
    return item.state_dict() if hasattr(item, "state_dict") else item


def mlp(seed: int = 1, hidden: int = 13) -> nn.Sequential:
    """Of odd sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def norm_net() -> nn.Sequential:
    """With the buffers of BatchNorm, and dropout."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Dropout(0.1), nn.Linear(13, 3))


def batch(step: int, size: int = 9, width: int = 7) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int, like: torch.Tensor | None = None) -> torch.Tensor:
    x = batch(step)
    y = model(x if like is None else x.to(like.dtype))
    return (y - x[:, :1].to(y.dtype)).square().mean()


def train(model: Any, optimizer: Any, step: int) -> None:
    """One step as most loops do it."""
    optimizer.zero_grad()
    loss_of(model, step, next(iter(model.parameters()))).backward()
    optimizer.step()


def adamw(model: nn.Module, rate: Any = 1e-2, **options: Any) -> torch.optim.AdamW:
    """The trained parameters in the fused AdamW, which ckpt replays by itself."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, rate, **{"fused": True, **options})


@dataclass(frozen=True)
class Loop:
    """A loop by its name."""

    name: str
    topic: str
    body: Callable[[Run], None]
    needs: tuple[str, ...] = ()
    """Packages, without which it is skipped."""
    slow: bool = False


LOOPS: dict[str, Loop] = {}


def loop(*needs: str, slow: bool = False) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a loop under the name of its function."""

    def register(body: Callable[[Run], None]) -> Callable[[Run], None]:
        add(body.__name__, body, needs, slow=slow)
        return body

    return register


def add(name: str, body: Callable[[Run], None], needs: tuple[str, ...] = (), *, slow: bool = False) -> None:
    """Register a loop under a name."""
    name, topic = name.replace("_", "-"), body.__module__.rpartition(".")[2]
    assert name not in LOOPS, name
    LOOPS[name] = Loop(name, topic, body, needs, slow)
