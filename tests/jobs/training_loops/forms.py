"""Loops with unusual optimizers, groups, hooks, weights and modules."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from training_loops.run import STEPS, Run, SkipLoop, adamw, add, batch, loop, loss_of, mlp, norm_net, train


def plain(run: Run, model: nn.Module, optimizer: Any, **options: Any) -> None:
    for step in run.steps(model, optimizer, **options):
        train(model, optimizer, step)


class ClippingAdamW(torch.optim.AdamW):
    """Clips large gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class CautiousAdamW(torch.optim.AdamW):
    """Does something after ten percent of its steps."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if int(self.state[p]["step"]) == 6:
                    p.data.mul_(0.5)
        return loss


class NamedAdamW(torch.optim.AdamW):
    """A subclass that changes nothing."""


class CenteredAdamW(torch.optim.AdamW):
    """Gradient centralisation, for matrices only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad -= p.grad.mean(1, keepdim=True)
        return super().step(closure)


def of_class(kind: Any) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        plain(run, model, kind(model.parameters(), 1e-2, fused=True))

    return body


for kind in (ClippingAdamW, CautiousAdamW, NamedAdamW, CenteredAdamW):
    add(f"subclass_{kind.__name__}", of_class(kind))


@loop()
def step_method_replaced(run: Run) -> None:
    """An instance's `step` clips, as some libraries patch it."""
    model = mlp()
    optimizer = adamw(model)
    plain_step = optimizer.step

    def step(*arguments: Any, **named: Any) -> Any:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return plain_step(*arguments, **named)

    optimizer.step = step  # type: ignore[method-assign]
    plain(run, model, optimizer)


@loop()
def step_method_replaced_after_the_recorder(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        plain_step = optimizer.step

        def step(*arguments: Any, **named: Any) -> Any:
            result = plain_step(*arguments, **named)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.3, 0.3)
            return result

        optimizer.step = step  # type: ignore[method-assign]
        for number in range(STEPS):
            train(model, optimizer, number)
            run.after()


@loop(slow=True)
def compiled_step(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model, fused=False)
    step_compiled = torch.compile(lambda: optimizer.step())
    try:
        train(model, optimizer, 0)
        step_compiled()
    except Exception as error:
        raise SkipLoop(f"torch.compile: {error}"[:80]) from None
    for step in run.steps(model, optimizer, step=2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        step_compiled()


@loop(slow=True)
def compiled_step_method(run: Run) -> None:
    """`optimizer.step = torch.compile(optimizer.step)`, compiled after the recorder's start."""
    model = mlp()
    optimizer = adamw(model, fused=False, foreach=True)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    plain(run, model, optimizer)


@loop()
def compiled_step_eager_backend(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model, fused=False)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    plain(run, model, optimizer)


@loop()
def compiled_model(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    compiled = torch.compile(model, backend="eager")
    plain(run, compiled, optimizer)


@loop()
def compiled_regions(run: Run) -> None:
    model = norm_net()
    model[0] = torch.compile(model[0], backend="eager")
    plain(run, model, adamw(model))


@loop()
def compiled_in_place(run: Run) -> None:
    model = norm_net()
    model.compile(backend="eager")
    plain(run, model, adamw(model))


@loop()
def groups_fused_and_foreach(run: Run) -> None:
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "fused": True}]
    groups += [{"params": list(model[2].parameters()), "foreach": True, "fused": False}]
    plain(run, model, torch.optim.AdamW(groups, 1e-2))


@loop()
def groups_foreach_and_fused(run: Run) -> None:
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "foreach": True, "fused": False}]
    groups += [{"params": list(model[2].parameters()), "foreach": False, "fused": True, "amsgrad": True}]
    plain(run, model, torch.optim.AdamW(groups, 1e-2))


@loop()
def groups_with_and_without_momentum(run: Run) -> None:
    model = mlp()
    groups: Any = [{"params": list(model[0].parameters()), "momentum": 0.9}, {"params": list(model[2].parameters())}]
    plain(run, model, torch.optim.SGD(groups, 0.05))


@loop()
def a_group_for_each_parameter(run: Run) -> None:
    model = mlp()
    groups = [{"params": [p], "lr": 0.01 * (i + 1), "weight_decay": 0.1 * i} for i, p in enumerate(model.parameters())]
    plain(run, model, torch.optim.AdamW(groups, fused=True))


@loop()
def groups_with_names_and_strangers(run: Run) -> None:
    """Options that no optimizer knows."""
    model = mlp()
    groups = [{"params": [p], "name": name, "lr_scale": 0.5, "tags": ["a"]} for name, p in model.named_parameters()]
    plain(run, model, torch.optim.AdamW(groups, 1e-2, fused=True))


@loop()
def named_parameters(run: Run) -> None:
    model = mlp()
    plain(run, model, torch.optim.AdamW(model.named_parameters(), 1e-2, fused=True))


@loop()
def an_empty_group(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}], 1e-2, fused=True)
    plain(run, model, optimizer)


def hooked(when: str, which: str) -> Callable[[Run], None]:
    """A step hook that changes gradients or weights."""

    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model)

        def change(*_: Any) -> None:
            for parameter in model.parameters():
                if which == "pre":
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
                else:
                    parameter.data.clamp_(-0.2, 0.2)

        register = getattr(optimizer, f"register_step_{which}_hook")
        if when == "before":
            register(change)
        with run.record(model, optimizer):
            if when == "after":
                register(change)
            for step in range(STEPS):
                train(model, optimizer, step)
                run.after()

    return body


for when in ("before", "after"):
    for which in ("pre", "post"):
        add(f"{which}-hook-{when}-the-recorder", hooked(when, which))


@loop()
def global_post_hook(run: Run) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model = mlp()
    hook = register_optimizer_step_post_hook(lambda *_: [p.data.clamp_(-0.2, 0.2) for p in model.parameters()])
    try:
        plain(run, model, adamw(model))
    finally:
        hook.remove()


@loop()
def hook_replaces_gradients(run: Run) -> None:
    """A pre-hook gives other gradient tensors, after the recorder's."""
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):

        def change(*_: Any) -> None:
            for parameter in model.parameters():
                parameter.grad = parameter.grad.sign() if parameter.grad is not None else None

        optimizer.register_step_pre_hook(change)
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()


@loop()
def hook_changes_the_rate(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    run.sets_rates_first = True
    with run.record(model, optimizer):
        optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.9))
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()


@loop()
def group_added_in_mid_run(run: Run) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = adamw(model[2])
    run.resumes = False
    for step in run.steps(model, optimizer):
        if step == 4:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
            run.also()
        train(model, optimizer, step)


@loop()
def group_added_after_a_step(run: Run) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = adamw(model[2])
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})


@loop()
def group_removed(run: Run) -> None:
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.AdamW(groups, 1e-2, fused=True)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            for parameter in optimizer.param_groups.pop(0)["params"]:
                del optimizer.state[parameter]


@loop()
def optimizer_replaced(run: Run) -> None:
    """The recorder is not told, and nothing calls the first one again."""
    model = mlp()
    optimizer: Any = adamw(model)
    run.resumes = False
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):
            if step == 4:
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                run.optimizers = [optimizer]
            train(model, optimizer, step)
            run.expects_warning = recorder.step != step + 1
            run.after()


@loop()
def optimizer_of_the_same_class_again(run: Run) -> None:
    model = mlp()
    optimizer: Any = adamw(model)
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):
            if step == 4:
                optimizer = adamw(model, 1e-3)
                run.optimizers = [optimizer]
            train(model, optimizer, step)
            run.expects_warning = recorder.step != step + 1
            run.after()


@loop()
def parameter_replaced(run: Run) -> None:
    """`nn.Parameter(...)` in the place of another, and in the group of the optimizer."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
            del optimizer.state[optimizer.param_groups[0]["params"][0]]
            optimizer.param_groups[0]["params"][0] = model[0].weight


@loop()
def parameter_grows(run: Run) -> None:
    """As densification does: rows are added to a parameter and its moments."""
    model = mlp()
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            for name in ("weight", "bias"):
                old = getattr(model[2], name)
                new = nn.Parameter(torch.cat([old.detach(), old.detach()[:1]]))
                state = optimizer.state.pop(old)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.cat([state[key], torch.zeros_like(state[key][:1])])
                optimizer.state[new] = state
                params = optimizer.param_groups[0]["params"]
                params[next(i for i, p in enumerate(params) if p is old)] = new
                setattr(model[2], name, new)


@loop()
def module_added_in_mid_run(run: Run) -> None:
    """Progressive growing: the model gets a module, and the optimizer its parameters."""
    model = mlp()
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(model[3].parameters())})


@loop()
def recorder_before_the_model_is_finished(run: Run) -> None:
    """The model is moved to another memory format and type after the recorder began."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 3:
            model.double()
            for state in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].double()
            run.resumes = False


def conv_net() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Unflatten(1, (7, 1, 1)), nn.Conv2d(7, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(6, 5, 3, padding=1), nn.Flatten(), nn.Linear(5, 3))


@loop()
def channels_last(run: Run) -> None:
    model = conv_net().to(memory_format=torch.channels_last)
    plain(run, model, adamw(model))


@loop()
def channels_last_foreach(run: Run) -> None:
    model = conv_net().to(memory_format=torch.channels_last)
    plain(run, model, adamw(model, fused=False, foreach=True))


@loop()
def channels_last_sgd(run: Run) -> None:
    model = conv_net().to(memory_format=torch.channels_last)
    plain(run, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True))


@loop()
def channels_last_after_the_recorder(run: Run) -> None:
    model = conv_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 3:
            model.to(memory_format=torch.channels_last)


@loop()
def transposed_weights(run: Run) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
    plain(run, model, adamw(model))


@loop()
def sliced_weights(run: Run) -> None:
    """A parameter with gaps in its memory."""
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(13, 14)[:, ::2])
    plain(run, model, adamw(model, fused=False))


@loop()
def weights_with_shared_storage(run: Run) -> None:
    """Two parameters overlap in memory: both step the same values."""
    model = mlp()
    shared = torch.randn(13 * 7 + 13)
    model[0].weight, model[0].bias = nn.Parameter(shared[: 13 * 7].view(13, 7)), nn.Parameter(shared[80:93])
    plain(run, model, adamw(model, fused=False, foreach=False))


@loop()
def flush_denormal(run: Run) -> None:
    if not torch.set_flush_denormal(True):
        raise SkipLoop("this machine cannot flush denormal numbers")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    try:
        for step in run.steps(model, optimizer):
            optimizer.zero_grad()
            (loss_of(model, step) * 1e-37).backward()
            optimizer.step()
    finally:
        torch.set_flush_denormal(False)


@loop()
def denormal_gradients(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        (loss_of(model, step) * 1e-39).backward()
        optimizer.step()


class Empty(nn.Module):
    """With a parameter without elements, one of 0 dimensions, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.none, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale + self.none.sum()


@loop()
def parameters_without_elements(run: Run) -> None:
    model = Empty()
    plain(run, model, adamw(model))


@loop()
def frozen_parameter_without_elements(run: Run) -> None:
    model = Empty()
    model.none.requires_grad_(False)
    plain(run, model, adamw(model))


@loop()
def every_second_parameter_unused(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for number, parameter in enumerate(model.parameters()):
            if (number + step) % 2:
                parameter.grad = None
        optimizer.step()


@loop()
def lazy_modules(run: Run) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    plain(run, model, optimizer)


@loop()
def lazy_batch_norm(run: Run) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.LazyBatchNorm1d(), nn.Linear(5, 3))
    plain(run, model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.out = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.head(self.table((x[:, 0] * 5).long().abs() % 11)))


@loop()
def tied_weights(run: Run) -> None:
    model = Tied()
    model.head.weight = model.table.weight
    plain(run, model, adamw(model))


@loop()
def tied_in_mid_run(run: Run) -> None:
    model = Tied()
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model.head.weight = model.table.weight


@loop()
def untied_in_mid_run(run: Run) -> None:
    model = Tied()
    model.head.weight = model.table.weight
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model.head.weight = nn.Parameter(model.table.weight.detach().clone())
            optimizer.add_param_group({"params": [model.head.weight]})


def typed(dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp().to(dtype)
        plain(run, model, make(model.parameters()))

    return body


OPTIM = torch.optim
MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda p: OPTIM.AdamW(p, 1e-2, fused=True),
    "adamw-foreach": lambda p: OPTIM.AdamW(p, 1e-2, foreach=True),
    "sgd": lambda p: OPTIM.SGD(p, 0.05),
    "sgd-momentum": lambda p: OPTIM.SGD(p, 0.05, momentum=0.9),
}
for dtype in (torch.bfloat16, torch.float16, torch.float64):
    for name, make in MAKES.items():
        add(f"{str(dtype).removeprefix('torch.')}-{name}", typed(dtype, make))


@loop()
def weights_of_mixed_types(run: Run) -> None:
    model = mlp()
    model[2].bfloat16()
    whole = nn.Sequential(model[0], nn.Tanh(), model[2])
    optimizer = adamw(whole, foreach=False, fused=False)
    for step in run.steps(whole, optimizer):
        optimizer.zero_grad()
        loss_of(lambda x: model[2](torch.tanh(model[0](x)).bfloat16()), step).backward()
        optimizer.step()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight.T).abs()


@loop()
def complex_weights_adamw(run: Run) -> None:
    model = Complex()
    optimizer = adamw(model, fused=False)
    plain_loop_complex(run, model, optimizer)


@loop()
def complex_weights_sgd(run: Run) -> None:
    model = Complex()
    plain_loop_complex(run, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


def plain_loop_complex(run: Run, model: nn.Module, optimizer: Any) -> None:
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


class StochasticRounding(torch.optim.Optimizer):
    """SGD in bfloat16 with stochastic rounding: random numbers in the step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                exact = p.float() - group["lr"] * p.grad.float()
                noise = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
                p.copy_(((exact.view(torch.int32) + noise) & -65536).view(torch.float32))


@loop()
def stochastic_rounding(run: Run) -> None:
    model = mlp().bfloat16()
    plain(run, model, StochasticRounding(model.parameters(), 0.05))


@loop()
def functional_training(run: Run) -> None:
    """`torch.func`: the module is never called, and gradients are assigned."""
    from torch.func import functional_call, grad

    model = mlp()
    optimizer = adamw(model)
    named = dict(model.named_parameters())
    for step in run.steps(model, optimizer):
        gradients = grad(lambda weights, step=step: loss_of(lambda x: functional_call(model, weights, x), step))(
            {name: parameter.detach() for name, parameter in named.items()}
        )
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        optimizer.step()


@loop()
def functional_ensemble(run: Run) -> None:
    """Stacked weights in a ParameterDict, stepped as one, called by vmap."""
    from torch.func import functional_call, stack_module_state, vmap

    models = [mlp(seed) for seed in range(3)]
    stacked, _ = stack_module_state(models)
    weights = nn.ParameterDict({name.replace(".", "_"): value.detach() for name, value in stacked.items()})
    optimizer = adamw(weights)
    with run.record(weights, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()

            x = batch(step)

            def forward(one: Any, x: torch.Tensor = x) -> torch.Tensor:
                return (functional_call(models[0], one, x) - x[:, :1]).square().mean()

            vmap(forward)({name.replace("_", "."): value for name, value in weights.items()}).sum().backward()
            optimizer.step()
            run.after()


@loop()
def parameter_list_and_dict(run: Run) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.items = nn.ParameterList([nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(3))])
            self.by_name = nn.ParameterDict({"a.b": nn.Parameter(torch.randn(3))} if False else {"a": torch.randn(3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.items[0] + self.items[1] * self.by_name["a"]

    model = Lists()
    plain(run, model, adamw(model))


@loop()
def module_dict_never_called(run: Run) -> None:
    """Gaussian splatting: parameters without a module's forward pass."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"net": norm_net()})
    model["points"] = nn.ParameterDict({"mean": torch.randn(20, 3), "scale": torch.randn(20, 1)})
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        y = loss_of(model["net"], step) + (model["points"]["mean"] * model["points"]["scale"]).square().mean()
        y.backward()
        optimizer.step()


@loop()
def evaluated_in_inference_mode(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        model.eval()
        with torch.inference_mode():
            model(batch(50 + step))
        model.train()


@loop()
def model_copied_and_pickled_in_between(run: Run) -> None:
    """Copies have the recorder's hooks, if those are on modules or the optimizer."""
    model = norm_net()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):
            train(model, optimizer, step)
            copy, other = deepcopy(model), pickle.loads(pickle.dumps(model))
            run.after()
            train(copy, adamw(copy), step)
            other(batch(step))


@loop()
def optimizer_copied_in_between(run: Run) -> None:
    """A copy of the optimizer steps a copy of the model."""
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()
            before = recorder.step
            copy, other = deepcopy((model, optimizer))
            pickle.dumps(optimizer)
            train(copy, other, step)
            assert recorder.step == before, "the step of a copy counts"


@loop("peft")
def peft_lora(run: Run) -> None:
    import peft

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))

    model = peft.get_peft_model(Small(), peft.LoraConfig(target_modules=["up"], r=2, modules_to_save=["down"]))
    plain(run, model, adamw(model))


@loop("peft")
def peft_merged_for_evaluation(run: Run) -> None:
    import peft

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        model.merge_adapter()
        model.unmerge_adapter()


@loop("peft")
def peft_adapter_switched(run: Run) -> None:
    """A second adapter is added and trained from the middle of the run."""
    import peft

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0"], r=2))
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model.add_adapter("other", peft.LoraConfig(target_modules=["0"], r=3))
            model.set_adapter("other")
            optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "other" in n]})


@loop()
def fused_later(run: Run) -> None:
    """`load_state_dict` of an optimizer that was not fused."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            other = adamw(model, fused=False, foreach=True)
            optimizer.load_state_dict({**other.state_dict(), "state": optimizer.state_dict()["state"]})


@loop()
def differentiable_and_capturable(run: Run) -> None:
    model = mlp()
    plain(run, model, adamw(model, fused=False, foreach=False, maximize=True, amsgrad=True))
