"""Loops whose models have values that are no parameters: buffers, extra states, parametrizations."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from training_loops.run import STEPS, Run, adamw, batch, loop, loss_of, mlp, norm_net, train


def plain(run: Run, model: nn.Module, after: Any = None, **options: Any) -> None:
    """A plain loop, with something after each step."""
    optimizer = adamw(model, **options)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        if after is not None:
            with torch.no_grad():
                after(model, step)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        for name, parameter in self.net.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), parameter.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@loop()
def batch_norm(run: Run) -> None:
    plain(run, norm_net())


@loop()
def ema_in_buffers(run: Run) -> None:
    def follow(model: Any, step: int) -> None:
        for mine, other in zip(model.buffers(), model.parameters(), strict=True):
            mine.lerp_(other, 0.1)

    plain(run, Buffered(), follow)


@loop()
def ema_in_replaced_buffers(run: Run) -> None:
    def follow(model: Any, step: int) -> None:
        for (name, mine), other in zip(list(model.named_buffers()), model.parameters(), strict=True):
            setattr(model, name, mine * 0.9 + other * 0.1)

    plain(run, Buffered(), follow)


@loop()
def forward_in_train_mode_after_the_step(run: Run) -> None:
    run.checks_random = False
    plain(run, norm_net(), lambda model, step: model(batch(50 + step)))


@loop()
def buffer_changed_by_data(run: Run) -> None:
    plain(run, norm_net(), lambda model, step: model[1].running_mean.data.mul_(0.5))


@loop()
def buffer_changed_by_numpy(run: Run) -> None:
    def change(model: Any, step: int) -> None:
        model[1].running_mean.numpy()[0] = step

    plain(run, norm_net(), change)


@loop()
def statistics_reset_after_the_last_step(run: Run) -> None:
    plain(run, norm_net(), lambda model, step: step == STEPS - 1 and model[1].reset_running_stats())


@loop()
def statistics_kept_in_accumulation(run: Run) -> None:
    """Forward passes between two steps move the buffers."""
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        for i in range(3):
            (loss_of(model, 10 * step + i) / 3).backward()
        optimizer.step()


class Counting(nn.Module):
    """Buffers of other types, one of 0 dimensions, one that is not saved, one that is None."""

    seen: torch.Tensor
    flags: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("small", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("missing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.cache += 1
        return self.net(x)


@loop()
def buffers_of_many_types(run: Run) -> None:
    def change(model: Any, step: int) -> None:
        model.flags[step % 5] ^= True
        model.spectrum += 1j * step
        model.small += 0.5

    plain(run, Counting(), change)


@loop()
def buffer_registered_in_mid_run(run: Run) -> None:
    run.resumes = False

    def change(model: Any, step: int) -> None:
        if step == 4:
            model.register_buffer("late", torch.ones(4))

    plain(run, mlp(), change)


@loop()
def buffer_changes_its_shape(run: Run) -> None:
    """A replay memory that grows."""
    run.resumes = False
    model = mlp()
    model.register_buffer("memory", torch.zeros(0, 7))

    def change(model: Any, step: int) -> None:
        model.memory = torch.cat([model.memory, batch(step)])

    plain(run, model, change)


@loop()
def observers_of_quantization(run: Run) -> None:
    """Fake quantisation moves minimum and maximum in buffers of changing shapes."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), FakeQuantize(MovingAverageMinMaxObserver), nn.Linear(5, 3))
    plain(run, model)


@loop()
def spectral_norm_old(run: Run) -> None:
    torch.manual_seed(1)
    plain(run, nn.Sequential(nn.utils.spectral_norm(nn.Linear(7, 5)), nn.Tanh(), nn.Linear(5, 3)))


@loop()
def spectral_norm_parametrized(run: Run) -> None:
    torch.manual_seed(1)
    plain(run, nn.Sequential(parametrizations.spectral_norm(nn.Linear(7, 5)), nn.Tanh(), nn.Linear(5, 3)))


@loop()
def weight_norm_parametrized(run: Run) -> None:
    torch.manual_seed(1)
    plain(run, nn.Sequential(parametrizations.weight_norm(nn.Linear(7, 5)), nn.Tanh(), nn.Linear(5, 3)))


@loop()
def orthogonal_parametrized(run: Run) -> None:
    torch.manual_seed(1)
    plain(run, nn.Sequential(parametrizations.orthogonal(nn.Linear(7, 5)), nn.Tanh(), nn.Linear(5, 3)))


@loop()
def parametrized_weight_assigned(run: Run) -> None:
    """Assignment goes through `right_inverse` and changes the original."""
    torch.manual_seed(1)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(7, 5)), nn.Tanh(), nn.Linear(5, 3))

    def change(model: Any, step: int) -> None:
        model[0].weight = model[0].weight.clamp(-0.1, 0.1)

    plain(run, model, change)


class VectorQuantizer(nn.Module):
    """The codebook follows the batches by averages in buffers, inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(7, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("sizes", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.up(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                hot = nn.functional.one_hot(nearest, 6).float()
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.T @ z / self.sizes[:, None], alpha=0.1)
        return self.down(z + (self.codes[nearest] - z).detach())


@loop()
def vq_codebook(run: Run) -> None:
    plain(run, VectorQuantizer())


class Recurrent(nn.Module):
    """A hidden state that goes on from batch to batch, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.head = nn.GRUCell(7, 5), nn.Linear(5, 3)
        self.register_buffer("state", torch.zeros(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.cell(x, self.state.detach())
        return self.head(self.state)


@loop()
def hidden_state_in_a_buffer(run: Run) -> None:
    plain(run, Recurrent())


class Stateful(nn.Module):
    """With a state that is no tensor, and one that is."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.net, self.as_tensor, self.seen = mlp(), as_tensor, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.net(x)

    def get_extra_state(self) -> Any:
        return torch.tensor([self.seen]) if self.as_tensor else {"seen": self.seen, "names": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        self.seen = int(state[0]) if self.as_tensor else state["seen"]


@loop()
def extra_state_of_plain_values(run: Run) -> None:
    plain(run, Stateful(False))


@loop()
def extra_state_of_a_tensor(run: Run) -> None:
    plain(run, Stateful(True))


@loop()
def extra_state_changed_after_the_step(run: Run) -> None:
    def change(model: Any, step: int) -> None:
        model.seen += 1000

    plain(run, Stateful(False), change)


@loop()
def extra_state_of_bytes(run: Run) -> None:
    """As Transformer Engine has it: a pickled tensor of uint8."""
    model = Stateful(True)
    model.get_extra_state = lambda: torch.frombuffer(bytearray(f"{model.seen:06}".encode()), dtype=torch.uint8)  # type: ignore[method-assign]
    model.set_extra_state = lambda state: setattr(model, "seen", int(bytes(state.tolist())))  # type: ignore[method-assign]
    plain(run, model)


@loop()
def instance_norm_and_group_norm(run: Run) -> None:
    torch.manual_seed(1)
    layers = [nn.Unflatten(1, (7, 1)), nn.Conv1d(7, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)]
    model = nn.Sequential(*layers[:2], nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 3))
    model.insert(4, nn.BatchNorm1d(4, momentum=None))
    plain(run, model)
