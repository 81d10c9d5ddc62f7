"""Loops that look for what a recorder may miss: rare ways to change values, rare values, rare names."""

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from training_loops.run import STEPS, Run, SkipLoop, adamw, add, batch, loop, loss_of, mlp, norm_net, train


def plain(
    run: Run, model: nn.Module, optimizer: Any = None, after: Callable[[int], Any] | None = None, steps: int = STEPS
) -> None:
    """A plain loop, with something after each step."""
    optimizer = adamw(model) if optimizer is None else optimizer
    for step in run.steps(model, optimizer, count=steps):
        train(model, optimizer, step)
        if after is not None:
            after(step)


# Values that are changed where nothing counts


@loop()
def changed_by_numpy_and_back(run: Run) -> None:
    """Only one step has the change: its values return at the top of the next iteration, which may belong to it."""
    model = mlp()
    weight = model[0].weight.detach().numpy()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        if step == 6:
            weight[0, 0] -= 1.0
            run.also()
        train(model, optimizer, step)
        if step == 5:
            weight[0, 0] += 1.0
            run.note(changed=True)


@loop()
def one_value_of_a_large_tensor_by_numpy(run: Run) -> None:
    """No counter moves, and a slice of the bytes rarely has the value."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 40_000, bias=False), nn.Tanh(), nn.Linear(40_000, 3))
    weight = model[0].weight.detach().numpy()

    def change(step: int) -> None:
        if step == 5:
            weight[12_345, 3] += 1.0

    plain(run, model, torch.optim.SGD(model.parameters(), 1e-4), change, steps=7)


@loop()
def version_counters_preserved(run: Run) -> None:
    """As FSDP writes to its parameters."""
    model = mlp()

    def change(step: int) -> None:
        for parameter in model.parameters():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                parameter.clamp_(-0.2, 0.2)

    plain(run, model, after=change)


@loop()
def tensors_swapped(run: Run) -> None:
    """`swap_tensors` gives the same Python object other values."""
    model = mlp()

    def change(step: int) -> None:
        if step == 4:
            model.zero_grad()
            torch.utils.swap_tensors(model[2].bias, nn.Parameter(torch.ones(3)))

    plain(run, model, torch.optim.SGD(model.parameters(), 0.05), after=change)


@loop()
def changed_through_dlpack(run: Run) -> None:
    model = mlp()
    alias = torch.from_dlpack(torch.utils.dlpack.to_dlpack(model[0].weight.detach()))  # type: ignore[attr-defined]
    plain(run, model, after=lambda step: alias[0].mul_(0.5))


@loop()
def changed_by_a_pointer(run: Run) -> None:
    model = mlp()

    def change(step: int) -> None:
        ctypes.memset(model[2].weight.data_ptr() + 8 * (step % 9), 0, 4)

    plain(run, model, after=change)


@loop()
def moments_changed_by_a_pointer(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)

    def change(step: int) -> None:
        ctypes.memset(optimizer.state[model[2].weight]["exp_avg"].data_ptr(), 0, 4)

    plain(run, model, optimizer, change)


@loop()
def shared_with_a_child_process(run: Run) -> None:
    """As Hogwild: another process writes the weights."""
    import os

    model = mlp().share_memory()

    def change(step: int) -> None:
        pid = os.fork()
        if pid == 0:
            model[0].weight.detach().numpy()[0] = step
            os._exit(0)
        os.waitpid(pid, 0)

    plain(run, model, after=change)


@loop()
def frozen_changed_by_numpy(run: Run) -> None:
    model = mlp()
    model[0].requires_grad_(False)

    def change(step: int) -> None:
        if step == 5:
            model[0].weight.numpy()[2, 2] += 1.0

    plain(run, model, after=change)


@loop()
def clipped_in_a_backward_hook(run: Run) -> None:
    model = mlp()

    def clip(*_: Any) -> None:
        model[2].weight.data.clamp_(-0.1, 0.1)

    model[2].register_full_backward_hook(clip)
    plain(run, model)


@loop()
def clipped_in_a_hook_of_a_gradient(run: Run) -> None:
    model = mlp()

    def change(parameter: torch.Tensor) -> None:
        parameter.data.clamp_(-0.1, 0.1)

    model[0].weight.register_post_accumulate_grad_hook(change)
    plain(run, model)


@loop()
def clipped_in_a_forward_hook(run: Run) -> None:
    model = mlp()

    def clip(*_: Any) -> None:
        model[0].weight.data.clamp_(-0.1, 0.1)
        if run.recorder is not None:
            run.also()

    model.register_forward_pre_hook(clip)
    run.resumes = False
    plain(run, model)


@loop()
def clipped_in_zero_grad(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    zero = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        zero(set_to_none)
        model[0].weight.data.clamp_(-0.1, 0.1)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.zero_grad()
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        optimizer.zero_grad()


@loop()
def changed_between_two_optimizers(run: Run) -> None:
    model = mlp()
    one, other = adamw(model[0]), adamw(model[2])
    for step in run.steps(model, [one, other]):
        model.zero_grad()
        loss_of(model, step).backward()
        one.step()
        model[2].weight.data.clamp_(-0.1, 0.1)
        model[0].weight.data.clamp_(-0.1, 0.1)
        run.after()
        other.step()


@loop()
def note_in_the_middle_of_a_swap(run: Run) -> None:
    """The averages are in the model when a note is taken."""
    model = mlp()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model)

    def swap() -> None:
        for mine, other in zip(average, model.parameters(), strict=True):
            held_back = other.detach().clone()
            other.data.copy_(mine)
            mine.copy_(held_back)

    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        swap()
        run.note(score=float(loss_of(model, 99)))
        swap()


@loop()
def several_changes_of_one_step(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        for i in range(3):
            model[0].weight.data.mul_(0.9)
            run.note(i=i)
            model(batch(i))


@loop()
def changed_and_then_nothing(run: Run) -> None:
    """The change comes before the first step, and no step follows."""
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        model[0].weight.data.clamp_(-0.1, 0.1)
        run.after()


@loop()
def changed_within_a_long_run(run: Run) -> None:
    """Two hundred steps; a small change at a step that no proof is near."""
    model = mlp()

    def change(step: int) -> None:
        if step in (91, 143):
            model[2].bias.detach().numpy()[1] += 0.125

    plain(run, model, after=change, steps=200)


# Values that are one tensor


@loop()
def two_parameters_with_one_storage(run: Run) -> None:
    """Both are stepped: the memory moves twice."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3))
    model[1].weight.data = model[0].weight.data
    plain(run, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


@loop()
def frozen_parameter_is_a_view_of_a_trained_one(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.head = nn.Parameter(self.net[0].weight.data[:3], requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    plain(run, Net())


class WithView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("first_row", self.net[0].weight.data[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@loop()
def buffer_is_a_view_of_a_weight(run: Run) -> None:
    plain(run, WithView())


class Twice(nn.Module):
    """One module under two names, and one buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = norm_net()
        self.again = self.first
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("same_counts", self.counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts += 1
        return self.first(x) + self.again(x)


@loop()
def module_and_buffer_under_two_names(run: Run) -> None:
    plain(run, Twice())


# Groups


def grouped() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "lr": 1e-2}, {"params": list(model[2].parameters()), "lr": 1e-3}]
    return model, torch.optim.AdamW(groups, fused=True, weight_decay=0.1)


@loop()
def groups_in_another_order(run: Run) -> None:
    model, optimizer = grouped()
    run.resumes = False
    plain(run, model, optimizer, lambda step: step == 4 and optimizer.param_groups.reverse())


@loop()
def parameters_in_another_order(run: Run) -> None:
    model, optimizer = grouped()
    run.resumes = False
    plain(run, model, optimizer, lambda step: step == 4 and optimizer.param_groups[0]["params"].reverse())


@loop()
def parameter_moves_to_another_group(run: Run) -> None:
    model, optimizer = grouped()
    run.resumes = False

    def move(step: int) -> None:
        if step == 4:
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())

    plain(run, model, optimizer, move)


@loop()
def parameter_leaves_and_returns(run: Run) -> None:
    model, optimizer = grouped()
    taken: list[Any] = []

    def move(step: int) -> None:
        if step == 3:
            taken.append(optimizer.param_groups[1]["params"].pop())
            taken.append(optimizer.state.pop(taken[0]))
        if step == 6:
            optimizer.param_groups[1]["params"].append(taken[0])
            optimizer.state[taken[0]] = taken[1]

    run.resumes = False
    plain(run, model, optimizer, move)


@loop()
def groups_replaced_by_equal_ones(run: Run) -> None:
    model, optimizer = grouped()

    def replace(step: int) -> None:
        optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]

    plain(run, model, optimizer, replace)


@loop()
def groups_with_odd_options(run: Run) -> None:
    model = mlp()
    odd = {"kind": torch.bfloat16, "scale": torch.ones(3), "table": {"a": [1, 2.5]}, "array": np.arange(3), "n": None}
    plain(run, model, torch.optim.AdamW([{"params": list(model.parameters()), **odd}], 1e-2, fused=True))


@loop()
def parameter_replaced_in_each_step(run: Run) -> None:
    """Python gives new objects the ids of old ones."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    run.resumes = False

    def replace(step: int) -> None:
        for name in ("weight", "bias"):
            model[0].register_parameter(name, nn.Parameter(getattr(model[0], name).detach().clone() * 0.9))
        optimizer.param_groups[0]["params"] = list(model.parameters())

    plain(run, model, optimizer, replace)


@loop()
def scheduler_after_the_recorder(run: Run) -> None:
    """It wraps `step`."""
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(STEPS):
            train(model, optimizer, step)
            scheduler.step()
            run.note(scheduler=scheduler)
            run.after()


RATES = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda o: RATES.ReduceLROnPlateau(o, patience=1),
    "warm-restarts": lambda o: RATES.CosineAnnealingWarmRestarts(o, 4),
    "sequential": lambda o: RATES.SequentialLR(o, [RATES.ConstantLR(o), RATES.ExponentialLR(o, 0.9)], [4]),
    "chained": lambda o: RATES.ChainedScheduler([RATES.ConstantLR(o), RATES.ExponentialLR(o, 0.9)]),
    "polynomial": lambda o: RATES.PolynomialLR(o, 20),
    "swalr": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3),
    "multiplicative": lambda o: RATES.MultiplicativeLR(o, lambda i: 0.95),
    "multistep": lambda o: RATES.MultiStepLR(o, [2, 5]),
}


def noted(schedule: Callable[[Any], Any]) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model)
        scheduler = schedule(optimizer)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
            scheduler.step(1.0) if isinstance(scheduler, RATES.ReduceLROnPlateau) else scheduler.step()
            run.note(scheduler=scheduler)

    return body


for name, schedule in SCHEDULES.items():
    add(f"schedule-{name}-noted", noted(schedule))


# Rare values


def begins(change: Callable[[Any, Any], Any], **options: Any) -> Callable[[Run], None]:
    """An optimizer whose state is edited before the recorder begins."""

    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model, **options)
        train(model, optimizer, 0)
        change(model, optimizer)
        plain(run, model, optimizer)

    return body


def _counts(value: Any) -> Callable[[Any, Any], Any]:
    return lambda model, optimizer: [state.update(step=value()) for state in optimizer.state.values()]


add("count-beyond-float32", begins(_counts(lambda: torch.tensor(2.0**24 - 2))))
add("count-in-float64", begins(_counts(lambda: torch.tensor(5.0, dtype=torch.float64)), fused=False))
add("count-of-integers", begins(_counts(lambda: torch.tensor(5)), fused=False, foreach=False))
add("count-of-thousands", begins(_counts(lambda: torch.tensor(123456.0))))
add("moments-of-nan", begins(lambda m, o: o.state[m[0].weight]["exp_avg"].fill_(float("nan"))))
add("moments-negative", begins(lambda m, o: o.state[m[0].weight]["exp_avg_sq"].fill_(-1.0)))
add("stranger-in-the-state", begins(lambda m, o: [s.update(extra=torch.ones(2), name="a") for s in o.state.values()]))
OPTIONS: dict[str, dict[str, Any]] = {
    "eps-zero": {"eps": 0.0},
    "betas-zero": {"betas": (0.0, 0.0)},
    "betas-list": {"betas": [0.8, 0.9]},
    "rate-zero": {"rate": 0.0},
    "rate-huge": {"rate": 1e30},
    "rate-tiny": {"rate": 1e-42},
    "decay-huge": {"weight_decay": 1e3},
}
for name, options in OPTIONS.items():
    add(f"adamw-{name}", begins(lambda m, o: None, **options))


@loop()
def rate_becomes_nan(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)

    def change(step: int) -> None:
        optimizer.param_groups[0]["lr"] = float("nan") if step == 4 else 1e-2

    plain(run, model, optimizer, change)


@loop()
def zero_gradients_and_zero_weights(run: Run) -> None:
    """Of both signs; 0 / 0 without eps."""
    model = mlp()
    optimizer = adamw(model, eps=0.0)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model[0].weight.grad[:3] = 0.0
        model[0].weight.grad[3:6] = -0.0
        model[0].weight.data[2:5] = -0.0
        optimizer.step()


@loop()
def signs_of_zero_sgd(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model[0].weight.grad[:3] = -0.0 if step % 2 else 0.0
        with torch.no_grad():
            model[0].weight[:3].copy_(torch.tensor(-0.0))
        optimizer.step()


@loop()
def flush_denormal_in_mid_run(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    if not torch.set_flush_denormal(False):
        raise SkipLoop("this machine cannot flush denormal numbers")
    try:
        for step in run.steps(model, optimizer):
            torch.set_flush_denormal(step in (5, 6))
            optimizer.zero_grad()
            (loss_of(model, step) * 1e-37).backward()
            optimizer.step()
    finally:
        torch.set_flush_denormal(False)


@loop()
def rounding_upwards_in_mid_run(run: Run) -> None:
    """Another library leaves the processor in another mode."""
    libm = ctypes.CDLL("libm.so.6")
    model = mlp()
    try:
        plain(run, model, after=lambda step: libm.fesetround(0x800 if step in (4, 5) else 0))
    finally:
        libm.fesetround(0)


@loop()
def step_under_autocast(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 1e-2)
    with run.record(model, optimizer), torch.autocast("cpu", torch.bfloat16):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            run.after()


@loop()
def clips_only_in_some_steps(run: Run) -> None:
    """A subclass whose step clips only steps 6 and 7, between two proofs."""

    class Sometimes(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls in (6, 7):
                nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
            return super().step(closure)

    model = mlp()
    plain(run, model, Sometimes(model.parameters(), 0.1, momentum=0.9))


@loop()
def clips_seldom_in_a_long_run(run: Run) -> None:
    class Seldom(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls in (91, 141):
                nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
            return super().step(closure)

    model = mlp()
    plain(run, model, Seldom(model.parameters(), 0.1, momentum=0.9), steps=160)


@loop()
def step_writes_a_frozen_parameter_and_a_buffer(run: Run) -> None:
    model = norm_net()
    model[0].requires_grad_(False)

    class Writes(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            model[0].weight.mul_(0.99)
            model[1].running_mean.mul_(0.5)

    trained = [p for p in model.parameters() if p.requires_grad]
    plain(run, model, Writes(trained, 0.1))


@loop()
def a_step_in_a_step(run: Run) -> None:
    """A post-hook steps a second optimizer, and a hook of that one steps nothing."""
    model = mlp()
    one, other = adamw(model[0]), adamw(model[2])
    one.register_step_post_hook(lambda *_: other.step())
    for step in run.steps(model, [one, other]):
        model.zero_grad()
        loss_of(model, step).backward()
        one.step()


@loop()
def a_step_calls_itself(run: Run) -> None:
    """A subclass that does two inner steps in one."""

    class Double(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            super().step()

    model = mlp()
    plain(run, model, Double(model.parameters(), 0.05, momentum=0.9))


class CountingState(torch.optim.SGD):
    """Its `state_dict` has one entry more, which it needs."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "past": torch.full((2,), float(self.calls))}

    def load_state_dict(self, state_dict: Any) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in ("calls", "past")})


@loop()
def state_dict_with_more_entries(run: Run) -> None:
    model = mlp()
    plain(run, model, CountingState(model.parameters(), 0.1, momentum=0.9))


@loop()
def one_gradient_for_two_parameters(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD([model[2].bias, model[0].bias], 0.1)
    shared = torch.ones(13)
    for step in run.steps(model, optimizer):
        shared += step
        model[0].bias.grad, model[2].bias.grad = shared, shared[:3]
        optimizer.step()


@loop()
def a_single_number(run: Run) -> None:
    model = nn.ParameterDict({"x": torch.tensor(3.0)})
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model["x"].square().backward()
            optimizer.step()
            run.after()


# Models


@loop()
def parametrized_in_mid_run(run: Run) -> None:
    model = mlp()
    run.resumes = False
    plain(run, model, after=lambda step: step == 4 and parametrizations.weight_norm(model[0]))


@loop()
def sparse_and_quantized_buffers(run: Run) -> None:
    model = mlp()
    model.register_buffer("adjacency", torch.eye(5).to_sparse())
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))
    plain(run, model)


@loop()
def sparse_buffer_changes(run: Run) -> None:
    model = mlp()
    model.register_buffer("adjacency", torch.eye(5).to_sparse())

    def change(step: int) -> None:
        model.adjacency = (torch.eye(5) * (step + 1)).to_sparse()

    plain(run, model, after=change)


@loop()
def buffer_in_float8(run: Run) -> None:
    model = mlp()
    model.register_buffer("scale", torch.ones(4).to(torch.float8_e4m3fn))

    def change(step: int) -> None:
        model.scale = torch.full((4,), float(step + 1)).to(torch.float8_e4m3fn)

    plain(run, model, after=change)


@loop()
def buffer_changes_its_type(run: Run) -> None:
    model = norm_net()
    run.resumes = False

    def change(step: int) -> None:
        if step == 4:
            model[1].register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.int32))

    plain(run, model, after=change)


@loop()
def buffer_becomes_none_and_returns(run: Run) -> None:
    model = mlp()
    model.register_buffer("cache", torch.ones(3))
    run.resumes = False

    def change(step: int) -> None:
        model.cache = None if step in (3, 4) else torch.full((3,), float(step))

    plain(run, model, after=change)


class Renamed(nn.Module):
    """Its `state_dict` has other names than its parameters, and one computed entry."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_state_dict_post_hook(Renamed.change)

    @staticmethod
    def change(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}norm"] = module.net[0].weight.detach().norm()

    def load_state_dict(self, state: Any, *arguments: Any, **named: Any) -> Any:
        return super().load_state_dict({k: v for k, v in state.items() if k != "norm"}, *arguments, **named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@loop()
def state_dict_with_a_computed_entry(run: Run) -> None:
    plain(run, Renamed())


class Labelled(torch.Tensor):
    """A subclass of tensors."""


@loop()
def parameters_of_a_subclass(run: Run) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Labelled))
    plain(run, model)


@loop()
def names_of_all_kinds(run: Run) -> None:
    """Slashes, spaces, other alphabets, and the words of the format."""
    names = ("a/b", "x y", "größe", "param", "step", "-", "%2F", "random_states", "a|b", "*", "q" * 150)
    model = nn.ParameterDict({name: torch.randn(3) for name in names})
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.stack(list(model.values())).square().sum().backward()
            optimizer.step()
            run.after()


@loop()
def parameters_of_one_shape_and_similar_names(run: Run) -> None:
    names = ("w", "w1", "w10", "w_1", "W")
    model = nn.ParameterDict({name: torch.randn(3) for name in names})
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        (torch.stack(list(model.values())) * step).square().sum().backward()
        optimizer.step()


# Notes and random numbers


@loop()
def notes_with_names_of_the_format(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        run.note(model=step, optimizer="a", extras=[1], step=step * 10)


@loop()
def note_named_random_states(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        run.note(random_states={"mine": step}, ckpt=step)


@loop()
def notes_of_two_calls(run: Run) -> None:
    """A callback notes one thing, the loop another: both belong to the step."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        run.note(epoch=step)
        before = run._notes
        run.note(loss=0.5 * step)
        run._notes = {**before, **run._notes}


@loop()
def notes_before_the_first_step(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        run.note(epoch=0)
        run.after()
        plain_steps(run, model, optimizer)


def plain_steps(run: Run, model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        train(model, optimizer, step)
        run.after()


@loop()
def notes_of_odd_values(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(5)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        torch.randn(3, generator=generator)
        odd = {1: float("nan"), (2, "a"): -0.0, "inf": float("inf"), "big": 1 << 80, "bytes": b"\0\xff", "": {}}
        run.note(odd=odd, generator=generator.get_state(), t=torch.ones(2, requires_grad=True), np=np.float32(0.1))
        run._notes = {key: leaf for key, leaf in run._notes.items() if not key.startswith("odd")}


def cached(draw: Callable[[], Any]) -> Callable[[Run], None]:
    """A generator that has the second number of a pair in store."""

    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model)
        for step in run.steps(model, optimizer):
            draw()
            train(model, optimizer, step)
            run.note(epoch=step)

    return body


add("random-numpy-cached-gauss", cached(lambda: np.random.randn(1)))
add("random-python-cached-gauss", cached(lambda: random.gauss(0, 1)))
add("random-torch-cached-normal", cached(lambda: torch.randn(1)))


@loop()
def random_states_changed_by_the_loss(run: Run) -> None:
    """Dropout in backward, by checkpointing, and random numbers of a closure."""
    model = norm_net()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step) + torch.rand(()) * 0
                loss.backward()
                np.random.rand()
                return loss

            optimizer.step(closure)
            run.after()
