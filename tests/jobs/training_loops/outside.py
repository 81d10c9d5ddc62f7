"""Loops that change weights, states or options outside the optimizer's step."""
# ruff: noqa: E501 -- tables are read along their lines

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from training_loops.run import STEPS, Run, adamw, add, batch, loop, loss_of, mlp, norm_net, train

Change = Callable[[Any, torch.optim.Optimizer, int], Any]


def changed(change: Change, make: Callable[[], nn.Module] = mlp, **options: Any) -> Callable[[Run], None]:
    """A loop that changes something after each step."""

    def body(run: Run) -> None:
        model = make()
        optimizer = adamw(model, **options)
        run.checks_random = False  # some changes draw numbers
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
            change(model, optimizer, step)

    return body


def in_no_grad(change: Change) -> Change:
    def quiet(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            change(model, optimizer, step)

    return quiet


def each(change: Callable[[torch.Tensor], Any]) -> Change:
    return in_no_grad(lambda model, optimizer, step: [change(p) for p in model.parameters()])


def at(when: int, change: Change) -> Change:
    return lambda model, optimizer, step: change(model, optimizer, step) if step == when else None


def by_numpy(model: Any, optimizer: Any, step: int) -> None:
    """No version counter moves."""
    model[0].weight.detach().numpy()[0] *= np.float32(0.5)


def by_data_in_place(model: Any, optimizer: Any, step: int) -> None:
    """`.data` does not move the version counter of the parameter."""
    model[0].weight.data[1, 2] += 0.25


def by_new_data(model: Any, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.999


def by_vector(model: Any, optimizer: Any, step: int) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clamp(-0.2, 0.2), model.parameters())


def by_set(model: Any, optimizer: Any, step: int) -> None:
    model[0].weight.set_(torch.full_like(model[0].weight, 0.01 * step))


def by_storage(model: Any, optimizer: Any, step: int) -> None:
    model[2].bias.untyped_storage().copy_(torch.ones(3).untyped_storage())


def one_element(model: Any, optimizer: Any, step: int) -> None:
    """The smallest change there is."""
    weight = model[0].weight
    weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(9.0))


def only_sign_of_zero(model: Any, optimizer: Any, step: int) -> None:
    model[0].bias[0] = -0.0 if step % 2 else 0.0


CHANGES: dict[str, Change] = {
    "clip-data-clamp": lambda model, optimizer, step: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "clip-no-grad": each(lambda p: p.clamp_(-0.1, 0.1)),
    "clip-copy": each(lambda p: p.copy_(p.clamp(-0.1, 0.1))),
    "clip-vector": by_vector,
    "clip-new-data": by_new_data,
    "clip-foreach": in_no_grad(lambda model, optimizer, step: torch._foreach_mul_(list(model.parameters()), 0.99)),
    "clip-inference-mode": lambda model, optimizer, step: [_in_inference_mode(p) for p in model.parameters()],
    "clip-every-third": lambda model, optimizer, step: step % 3 == 2 and [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "change-by-numpy": by_numpy,
    "change-by-data-index": by_data_in_place,
    "change-by-storage": in_no_grad(by_storage),
    "change-by-set": in_no_grad(by_set),
    "change-by-one-ulp": in_no_grad(one_element),
    "change-sign-of-zero": in_no_grad(only_sign_of_zero),
    "noise-sgld": each(lambda p: p.add_(torch.randn(p.shape), alpha=1e-3)),
    "normalized-rows": in_no_grad(lambda model, optimizer, step: model[0].weight.copy_(nn.functional.normalize(model[0].weight))),
    "decay-by-hand": each(lambda p: p.mul_(0.999)),
    "grid-of-quantization": each(lambda p: p.copy_((p * 64).round() / 64)),
    "orthogonal-by-qr": in_no_grad(lambda model, optimizer, step: model[0].weight.copy_(torch.linalg.qr(model[0].weight)[0])),
    "reinit-layer": at(4, lambda model, optimizer, step: nn.init.normal_(model[0].weight)),
    "reset-parameters": at(4, lambda model, optimizer, step: model[0].reset_parameters()),
    "state-clear": at(4, lambda model, optimizer, step: optimizer.state.clear()),
    "state-new-dict": at(4, lambda model, optimizer, step: setattr(optimizer, "state", defaultdict(dict))),
    "state-of-one-deleted": at(4, lambda model, optimizer, step: optimizer.state.pop(model[0].weight)),
    "moments-zeroed": at(4, lambda model, optimizer, step: [s["exp_avg"].zero_() for s in optimizer.state.values()]),
    "moments-replaced": at(4, lambda model, optimizer, step: [s.update(exp_avg=s["exp_avg"] * 0.5) for s in optimizer.state.values()]),
    "moments-pruned-relora": at(4, lambda model, optimizer, step: [s["exp_avg_sq"].mul_(torch.rand_like(s["exp_avg_sq"]) > 0.9) for s in optimizer.state.values()]),
    "count-reset": at(4, lambda model, optimizer, step: [s["step"].zero_() for s in optimizer.state.values()]),
    "count-replaced": at(4, lambda model, optimizer, step: [s.update(step=torch.tensor(1.0)) for s in optimizer.state.values()]),
    "count-of-one-reset": at(4, lambda model, optimizer, step: optimizer.state[model[2].bias]["step"].zero_()),
    "betas-changed": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(betas=(0.5, 0.9))),
    "decay-changed": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(weight_decay=0.1)),
    "eps-changed": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(eps=1e-3)),
    "maximize-changed": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(maximize=True)),
    "fused-to-foreach": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(fused=False, foreach=True)),
    "rate-numpy": lambda model, optimizer, step: optimizer.param_groups[0].update(lr=np.float32(0.01) / np.float32(step + 1)),
    "rate-numpy-float64": lambda model, optimizer, step: optimizer.param_groups[0].update(lr=np.float64(0.01) / (step + 1)),
    "rate-int": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(lr=0)),
    "rate-becomes-tensor": at(4, lambda model, optimizer, step: optimizer.param_groups[0].update(lr=torch.tensor(0.003))),
    "weights-and-states": at(4, lambda model, optimizer, step: (model[0].weight.data.zero_(), optimizer.state[model[0].weight]["exp_avg"].fill_(1))),
    "optimizer-reloaded": at(4, lambda model, optimizer, step: optimizer.load_state_dict(adamw(model).state_dict())),
}  # fmt: skip
for name, change in CHANGES.items():
    add(name, changed(change))
add("amsgrad-later", changed(at(4, lambda model, optimizer, step: _set_amsgrad(optimizer)), fused=False))
add("clip-not-fused", changed(CHANGES["clip-no-grad"], fused=False))
add(
    "rate-tensor-filled",
    changed(lambda m, o, s: o.param_groups[0]["lr"].fill_(0.01 / (s + 1)), rate=torch.tensor(0.01)),
)


@torch.inference_mode()
def _in_inference_mode(parameter: torch.Tensor) -> None:
    parameter.clamp_(-0.1, 0.1)


def _set_amsgrad(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = True
    for state in optimizer.state.values():
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


@loop()
def wgan_critic_of_a_gan(run: Run) -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    one, other = torch.optim.RMSprop(generator.parameters(), 5e-3), torch.optim.RMSprop(critic.parameters(), 5e-3)
    for step in run.steps(both, [one, other]):
        for i in range(2):
            other.zero_grad()
            (critic(generator(batch(step)).detach()).mean() - critic(batch(step + i, 9, 3)).mean()).backward()
            other.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.05, 0.05)
            run.after()
        one.zero_grad()
        (-critic(generator(batch(step)))).mean().backward()
        one.step()


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((x[:, 0] * 5).long().abs() % 11))


@loop()
def max_norm_embedding(run: Run) -> None:
    """The forward pass changes the table just before the step."""
    changed(lambda *_: None, Renormed)(run)


@loop()
def max_norm_embedding_with_evaluation(run: Run) -> None:
    """An evaluation after the step changes the table, too."""
    changed(lambda model, optimizer, step: model.eval()(batch(step + 50)) is model.train(), Renormed)(run)


@loop()
def decay_between_backward_and_step(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
        optimizer.step()


@loop()
def sam_by_hand(run: Run) -> None:
    """Weights are moved and moved back, up to the last bit."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in run.steps(model, optimizer):
        loss_of(model, step).backward()
        moves = [p.grad * 0.05 for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()


@loop()
def change_at_the_top_of_an_iteration(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        if step == 5:
            nn.init.zeros_(model[2].weight)
            run.after()  # still the state of step 5
        train(model, optimizer, step)


@loop()
def best_weights_reloaded(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 2:
            best = deepcopy(model.state_dict())
        if step == 6:
            model.load_state_dict(best)


@loop()
def rolled_back_to_a_checkpoint(run: Run) -> None:
    """After a spike of the loss: model and optimizer."""
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 2:
            best = deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 6:
            model.load_state_dict(best[0])
            optimizer.load_state_dict(best[1])


@loop()
def weights_assigned(run: Run) -> None:
    """`assign=True` gives the model other tensors than those of the optimizer."""
    model = mlp()
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            model.load_state_dict(mlp(2).state_dict(), assign=True)


@loop()
def checkpoint_loaded_after_the_recorder_began(run: Run) -> None:
    model, trained = mlp(), mlp(2)
    optimizer, other = adamw(model), adamw(trained)
    train(trained, other, 0)
    with run.record(model, optimizer):
        model.load_state_dict(trained.state_dict())
        optimizer.load_state_dict(other.state_dict())
        run.after()
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()


@loop()
def pruned_in_mid_run(run: Run) -> None:
    """`weight` becomes `weight_orig` and a mask."""
    model = mlp()
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            prune.random_unstructured(model[0], "weight", 0.3)


@loop()
def pruned_from_the_start(run: Run) -> None:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", 0.3)
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            prune.l1_unstructured(model[0], "weight", 0.3)  # a mask of more zeros


@loop()
def pruning_made_permanent(run: Run) -> None:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", 0.3)
    optimizer = adamw(model)
    run.resumes = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 4:
            prune.remove(model[0], "weight")


@loop()
def mask_after_each_step(run: Run) -> None:
    model = mlp()
    mask = model[0].weight.detach().abs() > 0.1
    changed(in_no_grad(lambda m, o, s: m[0].weight.mul_(mask)), lambda: model)(run)


@loop()
def masked_gradients(run: Run) -> None:
    model = mlp()
    mask = model[0].weight.detach().abs() > 0.1
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    changed(lambda *_: None, lambda: model)(run)


@loop()
def lora_merged_and_unmerged(run: Run) -> None:
    """The frozen base is rounded each time."""
    base = nn.Linear(7, 3)
    base.requires_grad_(False)
    model = nn.ModuleDict({"base": base, "down": nn.Linear(7, 2, bias=False), "up": nn.Linear(2, 3, bias=False)})
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(lambda x: base(x) + model["up"](model["down"](x)), step).backward()
        optimizer.step()
        with torch.no_grad():
            delta = model["up"].weight @ model["down"].weight
            base.weight.add_(delta)
            base.weight.sub_(delta)


@loop()
def relora_merges_and_starts_again(run: Run) -> None:
    base = nn.Linear(7, 3).requires_grad_(False)
    model = nn.ModuleDict({"base": base, "down": nn.Linear(7, 2, bias=False), "up": nn.Linear(2, 3, bias=False)})
    optimizer = adamw(model)
    run.checks_random = False  # new weights draw numbers
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(lambda x: base(x) + model["up"](model["down"](x)), step).backward()
        optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                base.weight.add_(model["up"].weight @ model["down"].weight)
            model["down"].reset_parameters()
            nn.init.zeros_(model["up"].weight)
            optimizer.state.clear()


@loop()
def reptile_interpolates(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    slow = [p.detach().clone() for p in model.parameters()]
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step % 3 == 2:
            with torch.no_grad():
                for mine, other in zip(slow, model.parameters(), strict=True):
                    other.copy_(mine.lerp_(other, 0.5))


@loop()
def swapped_with_averages_for_evaluation(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    average = deepcopy(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
                swap = other.data
                other.data, mine.data = mine.data, swap
            model(batch(step))
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                swap = other.data
                other.data, mine.data = mine.data, swap


@loop()
def left_swapped_with_averages(run: Run) -> None:
    """Evaluated after every third step, and then trained on."""
    model = mlp()
    optimizer = adamw(model)
    average = deepcopy(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step % 3 == 2:
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.data, other.data = other.data, mine.data


@loop()
def steps_without_the_optimizer(run: Run) -> None:
    """Some updates are done by hand, as an evolution strategy does."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        for i in range(2):
            loss_of(model, 50 + i).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)


@loop()
def clipped_after_note(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        run.note(loss=1.5 * step)
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)


@loop()
def views_of_one_flat_tensor(run: Run) -> None:
    """Parameters are views of a tensor, which is clipped."""
    model = mlp()
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    at = 0
    for parameter in model.parameters():
        parameter.data = whole[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    changed(lambda m, o, s: whole.clamp_(-0.2, 0.2), lambda: model)(run)


@loop()
def momentum_begins_later(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 3:
            optimizer.param_groups[0]["momentum"] = 0.9


@loop()
def momentum_ends(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if step == 3:
            optimizer.param_groups[0]["momentum"] = 0.0


def rate(start: Any, **options: Any) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model, start, **options)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)

    return body


add("rate-tensor-0-dim", rate(torch.tensor(0.01)))
add("rate-tensor-1-element", rate(torch.tensor([0.01]), fused=False, foreach=False))
add("rate-tensor-float64", rate(torch.tensor(0.01, dtype=torch.float64)))
add("rate-numpy-from-the-start", rate(np.float32(0.01)))
add("rate-int-from-the-start", rate(1))
add("betas-tensors", rate(0.01, betas=(torch.tensor(0.9), torch.tensor(0.99)), fused=False))
add("decay-numpy", rate(0.01, weight_decay=np.float32(0.1)))


@loop()
def rate_by_a_step_of_a_schedule_at_the_top(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    run.sets_rates_first = True
    for step in run.steps(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        train(model, optimizer, step)


def scheduled(
    optimize: Callable[[Any], torch.optim.Optimizer], schedule: Callable[[Any], Any], noted: bool = False
) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = optimize(model.parameters())
        scheduler = schedule(optimizer)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
            scheduler.step()
            if noted:
                run.note(scheduler=scheduler)

    return body


OPTIM, RATES = torch.optim, torch.optim.lr_scheduler
SCHEDULED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], Any]]] = {
    "onecycle-nadam": (lambda p: OPTIM.NAdam(p, 1e-3), lambda o: RATES.OneCycleLR(o, 0.01, total_steps=20)),
    "onecycle-adamw": (lambda p: OPTIM.AdamW(p, 1e-3, fused=True), lambda o: RATES.OneCycleLR(o, 0.01, total_steps=20)),
    "onecycle-sgd": (lambda p: OPTIM.SGD(p, 1e-3, momentum=0.9), lambda o: RATES.OneCycleLR(o, 0.01, total_steps=20)),
    "cosine-adamw": (lambda p: OPTIM.AdamW(p, 1e-2, fused=True), lambda o: RATES.CosineAnnealingLR(o, 10)),
    "warmup-tensor-rate": (lambda p: OPTIM.AdamW(p, torch.tensor(1e-2)), lambda o: RATES.LinearLR(o, 0.1)),
    "lambda-zero-warmup": (lambda p: OPTIM.AdamW(p, 1e-2, fused=True), lambda o: RATES.LambdaLR(o, lambda i: i / 9)),
    "cyclic-sgd": (lambda p: OPTIM.SGD(p, 1e-3, momentum=0.9), lambda o: RATES.CyclicLR(o, 1e-3, 1e-1, 3)),
}
for name, (optimize, schedule) in SCHEDULED.items():
    add(name, scheduled(optimize, schedule))
    add(f"{name}-noted", scheduled(optimize, schedule, noted=True))
