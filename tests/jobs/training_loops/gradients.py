"""Loops with unusual gradients, closures, and calls of the step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from training_loops.run import STEPS, Run, adamw, add, batch, loop, loss_of, mlp, norm_net, train


def poisoned(
    value: float, when: tuple[int, ...], make: Callable[[Any], torch.optim.Optimizer]
) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = make(model.parameters())
        for step in run.steps(model, optimizer):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step in when:
                model[0].weight.grad[0, :3] = value
            optimizer.step()

    return body


ADAMW: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, 1e-2, fused=True)  # noqa: E731
SGD: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)  # noqa: E731
add("inf-gradient", poisoned(float("inf"), (3,), ADAMW))
add("negative-inf-gradient", poisoned(float("-inf"), (3,), ADAMW))
add("inf-then-negative-inf", poisoned(float("inf"), (3, 5), SGD))
add("nan-gradient", poisoned(float("nan"), (3,), ADAMW))
add("nan-gradient-sgd", poisoned(float("nan"), (3,), SGD))
add("huge-gradient-overflows-moment", poisoned(3e38, (3,), ADAMW))
add("inf-gradient-foreach", poisoned(float("inf"), (3,), lambda p: torch.optim.AdamW(p, 1e-2, foreach=True)))
add("nan-then-weights-reset", poisoned(float("nan"), (3,), ADAMW))


@loop()
def nan_with_payloads(run: Run) -> None:
    """NaNs of other bits, in a gradient and in a weight."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 3:
            model[0].weight.grad[0, 0] = torch.tensor(-4190000, dtype=torch.int32).view(torch.float32)
            model[2].bias.data[0] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
        optimizer.step()


@loop()
def gradients_set_to_zero(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def gradients_accumulated(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(3 * STEPS):
            (loss_of(model, step) / 3).backward()
            if step % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                run.after()


@loop()
def gradients_never_zeroed(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def step_without_gradients(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        if step not in (0, 4):
            loss_of(model, step).backward()
        optimizer.step()


@loop()
def two_steps_with_one_gradient(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        run.after()
        optimizer.step()


@loop()
def gradients_expanded(run: Run) -> None:
    """Gradients whose elements share memory."""
    model = mlp()
    optimizer = adamw(model, fused=False)
    for step in run.steps(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.tensor(0.1 * (step - 3)).expand(parameter.shape)
        optimizer.step()


@loop()
def gradients_that_are_the_weights(run: Run) -> None:
    """The gradient is the parameter's own memory: decay by gradient."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with run.record(model, optimizer):
        for _ in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = parameter.detach()
            optimizer.step()
            run.after()


@loop()
def gradient_penalty(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        x = batch(step).requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        (loss_of(model, step) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()


def closed(make: Callable[[Any], torch.optim.Optimizer], seldom: bool = False) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = norm_net()
        optimizer = make(model.parameters())
        with run.record(model, optimizer):
            for step in range(STEPS):

                def closure(step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                if seldom and step % 2:
                    closure()
                    optimizer.step()
                elif step % 3:
                    optimizer.step(closure)
                else:
                    optimizer.step(closure=closure)
                run.after()

    return body


add("closure-adamw", closed(ADAMW))
add("closure-in-every-second-step", closed(ADAMW, seldom=True))
add("closure-lbfgs", closed(lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3)))
add("closure-lbfgs-wolfe", closed(lambda p: torch.optim.LBFGS(p, 0.5, max_iter=4, line_search_fn="strong_wolfe")))


@loop()
def closure_that_skips_the_backward_pass(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step(lambda step=step: loss_of(model, step))


@loop()
def closure_that_changes_weights(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                model[0].weight.data.clamp_(-0.2, 0.2)
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
            run.after()


def scaled(
    make: Callable[[Any], torch.optim.Optimizer], unscales: bool = False, net: Callable[[], nn.Module] = mlp
) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = net()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in run.steps(model, optimizer, count=STEPS + 2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step) * (float("inf") if step in (0, 4) else 1)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            run.note(scaler=scaler)

    return body


add("scaler-fused", scaled(ADAMW, net=norm_net))  # a skipped step changes buffers
add("scaler-unscaled-fused", scaled(ADAMW, unscales=True))
add("scaler-sgd", scaled(SGD, net=norm_net))  # whose step is not called then
add("scaler-foreach", scaled(lambda p: torch.optim.AdamW(p, 1e-2, foreach=True), unscales=True))


@loop()
def autocast_bfloat16(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(40, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((x[:, 0] * 15).long().abs() % 40))


@loop()
def sparse_gradients_sgd(run: Run) -> None:
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def sparse_adam_and_adamw(run: Run) -> None:
    model = Sparse()
    both = [torch.optim.SparseAdam(model.table.parameters(), 0.01), adamw(model.head)]
    with run.record(model, both):
        for step in range(STEPS):
            for optimizer in both:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            for optimizer in both:
                optimizer.step()
                run.after()


@loop()
def sparse_adagrad(run: Run) -> None:
    model = Sparse()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def sparse_only_in_some_steps(run: Run) -> None:
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        model.table.sparse = step % 2 == 1
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def gan_with_two_optimizers(run: Run) -> None:
    generator, critic = norm_net(), nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    one, other = adamw(generator, betas=(0.5, 0.999)), adamw(critic, betas=(0.5, 0.999))
    for step in run.steps(both, [one, other]):
        other.zero_grad()
        (critic(generator(batch(step)).detach()).mean() - critic(batch(step, 9, 3)).mean()).backward()
        other.step()
        run.after()
        one.zero_grad()
        (-critic(generator(batch(step)))).mean().backward()
        one.step()


@loop()
def two_optimizers_share_a_parameter(run: Run) -> None:
    model = mlp()
    one, other = adamw(model), torch.optim.SGD(model[2].parameters(), 0.05, momentum=0.9)
    for step in run.steps(model, [one, other]):
        train(model, other if step % 2 else one, step)


@loop()
def an_optimizer_for_each_parameter_in_backward(run: Run) -> None:
    """Steps inside the backward pass, to save the memory of gradients."""
    model = mlp()
    by = {p: torch.optim.AdamW([p], 1e-2, fused=True) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        by[parameter].step()  # type: ignore[index]
        by[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for step in run.steps(model, list(by.values())):
        loss_of(model, step).backward()


@loop()
def stepped_in_backward_by_one_optimizer(run: Run) -> None:
    """Its groups are one for each parameter, the recorder knows one of two optimizers."""
    model = mlp()
    optimizer, other = adamw(model[0]), adamw(model[2])

    def step_now(_: torch.Tensor) -> None:
        other.step()
        other.zero_grad()

    model[2].weight.register_post_accumulate_grad_hook(step_now)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def gradient_checkpointing(run: Run) -> None:
    """Forward passes are done again in backward, with their random states."""
    from torch.utils.checkpoint import checkpoint

    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(lambda x: checkpoint(model, x, use_reentrant=False), step).backward()
        optimizer.step()


@loop()
def truncated_backpropagation(run: Run) -> None:
    """The step comes in the middle of a sequence."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"cell": nn.GRUCell(7, 5), "head": nn.Linear(5, 3)})
    optimizer = adamw(model)
    with run.record(model, optimizer):
        state = torch.zeros(9, 5)
        for step in range(STEPS):
            optimizer.zero_grad()
            for i in range(2):
                state = model["cell"](batch(2 * step + i), state)
            model["head"](state).square().mean().backward()
            state = state.detach()
            optimizer.step()
            run.after()


@loop()
def skipped_when_the_norm_is_large(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 100 and step % 3:
                optimizer.step()
                run.after()


@loop()
def step_fails_and_is_tried_again(run: Run) -> None:
    """A step raises in the middle, after some weights were changed; the loop goes on."""
    model = mlp()
    optimizer = adamw(model, fused=False, foreach=False)
    with run.record(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 4:
                good = model[2].bias.grad
                optimizer.state[model[2].bias]["exp_avg"] = torch.zeros(5)
                try:
                    optimizer.step()
                except RuntimeError:
                    optimizer.state[model[2].bias]["exp_avg"] = torch.zeros(3)
                    model[2].bias.grad = good
                run.after()
            optimizer.step()
            run.after()


@loop()
def trained_with_threads(run: Run) -> None:
    torch.set_num_threads(2)
    model = mlp(hidden=20_011)
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, count=4):
        train(model, optimizer, step)


@loop()
def number_of_threads_changes(run: Run) -> None:
    model = mlp(hidden=20_011)
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, count=6):
        torch.set_num_threads(1 + step % 2)
        train(model, optimizer, step)
