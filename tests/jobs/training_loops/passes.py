"""Loops that differ in which forward passes they make, when, and of which modules."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from training_loops.run import STEPS, Run, adamw, batch, loop, loss_of, mlp, norm_net, train


class Parts(nn.Module):
    """Has a forward pass of its own, but loops call its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = norm_net(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y

    def by_parts(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


@loop()
def parts_called_without_the_model(run: Run) -> None:
    model = Parts()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model.by_parts, step).backward()
        optimizer.step()
        with torch.no_grad():
            model.average.lerp_(model.head[0].weight.mean(0), 0.1)


@loop()
def parts_and_model_in_turn(run: Run) -> None:
    """The first steps call the model, later ones its parts, then both."""
    model = Parts()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        ways: list[Any] = [model] if step < 3 else [model.by_parts] if step < 6 else [model, model.by_parts]
        for way in ways:
            loss_of(way, step).backward()
        optimizer.step()
        with torch.no_grad():
            model.average.add_(1.0)


@loop()
def a_part_is_compiled_as_one_graph(run: Run) -> None:
    """A hook in it would break the graph, which `fullgraph` forbids."""
    model = Parts()
    model.body = mlp()
    body = torch.compile(model.body, backend="eager", fullgraph=True)
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(lambda x: model.head(body(x)), step).backward()
        optimizer.step()
        model.head[2].bias.data.clamp_(-0.1, 0.1)


@loop()
def several_passes_before_one_backward(run: Run) -> None:
    """As a discriminator sees real and generated data: each pass changes the statistics."""
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        (loss_of(model, step) + loss_of(model, step + 50)).backward()
        optimizer.step()


@loop()
def adapted_and_taken_back(run: Run) -> None:
    """As in MAML of first order: the weights are changed between two passes, and restored before the step."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        before = deepcopy(model.state_dict())
        for inner in range(3):
            grads = torch.autograd.grad(loss_of(model, 100 * step + inner), list(model.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.sub_(grad, alpha=0.1)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model.load_state_dict(before)
        optimizer.step()


@loop()
def a_pass_for_a_metric_after_a_clip(run: Run) -> None:
    """In training mode and with gradients, as careless loops do it."""
    model = norm_net()
    optimizer = adamw(model)
    run.checks_random = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        model[0].weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            loss_of(model, step + 20)
        model[4].weight.data.clamp_(-0.1, 0.1)


@loop()
def noted_between_pass_and_step(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    run.checks_random = False
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            recorder.note(loss=float(loss))
            loss.backward()
            optimizer.step()
            run.after()


@loop()
def accumulated_with_a_clip_after_the_step(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        for part in range(3):
            loss_of(model, 10 * step + part).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.mul_(0.99)


@loop()
def frozen_then_added_as_a_group(run: Run) -> None:
    """The body is frozen at first; later a group of the optimizer has it."""
    model = Parts()
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-2, fused=True)
    for step in run.steps(model, optimizer):
        if step == 4:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 1e-3})
            run.also()
        train(model, optimizer, step)


@loop()
def a_second_optimizer_waits(run: Run) -> None:
    """One of two optimizers takes its first step late, and then only every second time."""
    model = Parts()
    first, second = adamw(model.head), torch.optim.SGD(model.body.parameters(), 0.1, momentum=0.9)
    for step in run.steps(model, [first, second]):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, step).backward()
        first.step()
        if step > 3 and step % 2:
            run.after()
            second.step()


@loop()
def both_halves_share_the_middle(run: Run) -> None:
    """Two optimizers of one parameter: one steps all, the other, at another rate, a part again."""
    model = mlp()
    first, second = adamw(model), torch.optim.SGD(model[2].parameters(), 0.01, momentum=0.5)
    for step in run.steps(model, [first, second]):
        train(model, first, step)
        run.after()
        second.step()


@loop()
def all_parts_trained_in_eval_mode(run: Run) -> None:
    """As fine-tuning with frozen statistics does it."""
    model = norm_net().eval()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        model[0].bias.data.clamp_(-0.01, 0.01)


@loop()
def a_script_module(run: Run) -> None:
    model = torch.jit.script(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def statistics_estimated_again_by_passes(run: Run) -> None:
    """After the step, two passes in training mode estimate the statistics; gradients are off."""
    model = norm_net()
    optimizer = adamw(model)
    run.checks_random = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        with torch.no_grad():
            model[1].reset_running_stats()
            model(batch(step + 30))


@loop()
def evaluated_with_gradients_and_clipped(run: Run) -> None:
    """A pass in evaluation mode after the step, then a change of weights and of a buffer."""
    model = Parts()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        model.eval()
        loss_of(model, step + 20)
        model.body[0].weight.data.clamp_(-0.1, 0.1)
        loss_of(model, step + 21)
        model.train()
        model.average.add_(1.0)


@loop()
def decay_by_hand_in_eval_mode(run: Run) -> None:
    """Between the backward pass and the step."""
    model = norm_net().eval()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            model[0].weight.mul_(0.99)
        optimizer.step()


@loop()
def schedule_free_swap_with_train_at_the_top(run: Run) -> None:
    """Averages are in the model at the end of an iteration, and leave it at the top of the next one."""
    model = mlp()
    average = deepcopy(list(model.parameters()))
    optimizer = adamw(model)

    def swap() -> None:
        for mine, other in zip(average, model.parameters(), strict=True):
            mine.data, other.data = other.data, mine.data

    for step in run.steps(model, optimizer):
        swap()
        run.also()
        train(model, optimizer, step)
        swap()
