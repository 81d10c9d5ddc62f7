"""Loops that move parameters which no optimizer steps: averages, teachers and targets."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from training_loops.run import STEPS, Run, adamw, add, batch, loop, loss_of, mlp, norm_net, train


class Distilled(nn.Module):
    """A student and a teacher, as self-supervised training has them."""

    def __init__(self, make: Callable[[], nn.Module] = mlp) -> None:
        super().__init__()
        self.student = make()
        self.teacher = deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.teacher(x)
        return self.student(x) - 0.1 * y

    def pairs(self) -> Any:
        return zip(self.teacher.parameters(), self.student.parameters(), strict=True)


def taught(move: Callable[[Distilled, int], Any], make: Callable[[], nn.Module] = mlp) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = Distilled(make)
        optimizer = adamw(model)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
            with torch.no_grad():
                move(model, step)

    return body


def _hard_copy(model: Distilled, step: int) -> None:
    if step % 3 == 2:
        model.teacher.load_state_dict(model.student.state_dict())


def _soft_new_data(model: Distilled, step: int) -> None:
    for teacher, student in model.pairs():
        teacher.data = teacher.data * 0.9 + student.data * 0.1


def _cosine(model: Distilled, step: int) -> None:
    """As BYOL: the momentum grows."""
    for teacher, student in model.pairs():
        tau = 1 - (1 - 0.9) * (1 - step / STEPS)
        teacher.data = tau * teacher.data + (1 - tau) * student.data


def _foreach(model: Distilled, step: int) -> None:
    torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.1)


def _swap(model: Distilled, step: int) -> None:
    if step == 4:
        model.teacher = deepcopy(model.student).requires_grad_(False)


def _replaced_parameters(model: Distilled, step: int) -> None:
    for ours, other in zip(model.teacher.modules(), model.student.modules(), strict=True):
        for name, parameter in other._parameters.items():
            if parameter is not None:
                setattr(ours, name, nn.Parameter(parameter.clone(), requires_grad=False))


def _by_numpy(model: Distilled, step: int) -> None:
    for teacher, student in model.pairs():
        teacher.numpy()[...] = 0.9 * teacher.numpy() + 0.1 * student.detach().numpy()


MOVES: dict[str, Callable[[Distilled, int], Any]] = {
    "teacher-lerp": lambda m, s: [teacher.lerp_(student, 0.1) for teacher, student in m.pairs()],
    "teacher-mul-add": lambda m, s: [teacher.mul_(0.9).add_(student, alpha=0.1) for teacher, student in m.pairs()],
    "teacher-copy": lambda m, s: [teacher.copy_(0.9 * teacher + 0.1 * student) for teacher, student in m.pairs()],
    "teacher-data-copy": lambda m, s: [t.data.copy_(0.9 * t.data + 0.1 * s.data) for t, s in m.pairs()],
    "teacher-new-data": _soft_new_data,
    "teacher-numpy": _by_numpy,
    "teacher-byol": _cosine,
    "teacher-foreach": _foreach,
    "dqn-hard-copy": _hard_copy,
    "teacher-replaced": _swap,
    "teacher-parameters-replaced": _replaced_parameters,
}
for name, move in MOVES.items():
    add(name, taught(move))


def _with_buffers(model: Distilled, step: int) -> None:
    for teacher, student in model.pairs():
        teacher.lerp_(student, 0.1)
    for teacher, student in zip(model.teacher.buffers(), model.student.buffers(), strict=True):
        teacher.copy_(student)


add("teacher-with-buffers", taught(_with_buffers, norm_net))


class Moco(Distilled):
    """The teacher moves inside the forward pass, and a queue is a buffer."""

    queue: torch.Tensor
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(3, 27))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for teacher, student in self.pairs():
                teacher.data = teacher.data * 0.9 + student.data * 0.1
            keys = self.teacher(x)
        y = self.student(x)
        scores = y @ self.queue.clone().detach()
        at = int(self.at)
        self.queue[:, at : at + 9] = keys.T
        self.at[0] = (at + 9) % 27
        return y + scores.mean()


@loop()
def moco(run: Run) -> None:
    model = Moco()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)


@loop()
def moco_with_note(run: Run) -> None:
    model = Moco()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        run.note(epoch=step)


@loop()
def dino(run: Run) -> None:
    """A teacher, a centre in a buffer, a frozen last layer at first, gradients clipped one by one."""
    model = Distilled()
    model.register_buffer("center", torch.zeros(1, 3))
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        x = batch(step)
        with torch.no_grad():
            wanted = ((model.teacher(x) - model.center) / 0.04).softmax(-1)
        optimizer.zero_grad()
        (-wanted * (model.student(x) / 0.1).log_softmax(-1)).sum(-1).mean().backward()
        for parameter in model.student.parameters():
            nn.utils.clip_grad_norm_(parameter, 3.0)
        if step < 3:
            model.student[2].weight.grad = None
        optimizer.step()
        with torch.no_grad():
            for teacher, student in model.pairs():
                teacher.data.mul_(0.996).add_(0.004 * student.detach().data)
            model.center.mul_(0.9).add_(model.teacher(x).mean(0, keepdim=True), alpha=0.1)


@loop()
def teacher_moved_before_the_step(run: Run) -> None:
    model = Distilled()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for teacher, student in model.pairs():
                teacher.lerp_(student, 0.1)
        optimizer.step()


@loop()
def ddpg_with_soft_targets(run: Run) -> None:
    torch.manual_seed(1)
    nets = nn.ModuleDict({"actor": nn.Linear(7, 3), "critic": nn.Linear(10, 1)})
    nets.update({f"{name}_target": deepcopy(net).requires_grad_(False) for name, net in list(nets.items())})
    one, other = adamw(nets["actor"]), adamw(nets["critic"], 1e-3)
    for step in run.steps(nets, [one, other]):
        x = batch(step)
        with torch.no_grad():
            wanted = nets["critic_target"](torch.cat([x, nets["actor_target"](x)], -1))
        other.zero_grad()
        (nets["critic"](torch.cat([x, nets["actor"](x).detach()], -1)) - wanted - 1).square().mean().backward()
        other.step()
        run.after()
        one.zero_grad()
        (-nets["critic"](torch.cat([x, nets["actor"](x)], -1))).mean().backward()
        one.step()
        with torch.no_grad():
            for name in ("actor", "critic"):
                for target, source in zip(nets[f"{name}_target"].parameters(), nets[name].parameters(), strict=True):
                    target.lerp_(source, 0.005)


class WithAverage(nn.Module):
    def __init__(self, ema: bool) -> None:
        super().__init__()
        self.net = norm_net()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def averaged(ema: bool) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = WithAverage(ema)
        optimizer = adamw(model.net)
        run.checks_random = False
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
            if ema or step >= 4:
                model.average.update_parameters(model.net)
            if step == STEPS - 1:
                update_bn([batch(i) for i in range(3)], model.average)

    return body


add("swa-with-update-bn", averaged(False))
add("ema-of-averaged-model", averaged(True))


@loop()
def swa_copied_into_the_model_at_the_end(run: Run) -> None:
    model = norm_net()
    average = AveragedModel(model)
    optimizer = adamw(model)
    run.checks_random = False
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        average.update_parameters(model)
        if step == STEPS - 1:
            model.load_state_dict(average.module.state_dict())
            update_bn([batch(i) for i in range(3)], model)


@loop()
def teacher_outside_the_model_noted(run: Run) -> None:
    model = mlp()
    teacher = deepcopy(model)
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)
        run.note(teacher=teacher)


@loop()
def part_is_stepped_by_an_optimizer_nobody_knows(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model[0])
    other = torch.optim.SGD(model[2].parameters(), 0.1)
    for step in run.steps(model, optimizer):
        other.zero_grad()
        train(model, optimizer, step)
        other.step()


@loop()
def frozen_by_requires_grad_each_half(run: Run) -> None:
    """As GANs do: weights of the other half have no gradients."""
    generator, critic = mlp(), nn.Linear(3, 1)
    both = nn.ModuleList([generator, critic])
    one, other = adamw(generator), adamw(critic)
    with run.record(both, [one, other]):
        for step in range(STEPS):
            for parts, optimizer, sign in ((critic, other, 1), (generator, one, -1)):
                generator.requires_grad_(parts is generator)
                critic.requires_grad_(parts is critic)
                optimizer.zero_grad()
                (sign * critic(generator(batch(step)))).mean().backward()
                optimizer.step()
                run.after()


@loop("ema_pytorch")
def ema_pytorch_inside(run: Run) -> None:
    from ema_pytorch import EMA

    model = nn.ModuleDict({"net": mlp()})
    model["ema"] = EMA(model["net"], beta=0.9, update_after_step=2, update_every=2, include_online_model=False)
    optimizer = adamw(model["net"])
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model["net"], step).backward()
        optimizer.step()
        model["ema"].update()
