"""Optimizers written by hand, in the forms that libraries and papers have them."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from training_loops.optimizers import trained
from training_loops.run import STEPS, Run, adamw, add, loop, loss_of, mlp


class Own(torch.optim.Optimizer):
    """Steps each parameter by itself with `update`."""

    defaults_of_class: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **self.defaults_of_class, **options})

    def begin(self) -> None:
        """Do what comes before all parameters."""

    def stepped(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, p.grad, self.state[p]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group, p, g, state in self.stepped():
            state["step"] = state.get("step", 0) + 1
            self.update(group, p, g, state)
        return loss

    def update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


def zeros(state: dict[str, Any], p: torch.Tensor, *names: str, dtype: Any = None) -> list[torch.Tensor]:
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(p, dtype=dtype)
    return [state[name] for name in names]


class Lion(Own):
    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (m,) = zeros(state, p, "exp_avg")
        p.mul_(1 - group["lr"] * 0.01).add_((0.9 * m + 0.1 * g).sign_(), alpha=-group["lr"])
        m.lerp_(g, 0.01)


class Adam8bit(Own):
    """Moments in uint8 with a scale for each block of 16."""

    @staticmethod
    def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % 16)).view(-1, 16)
        scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return (blocks / scale * 127 + 128).round().to(torch.uint8), scale

    @staticmethod
    def unpack(codes: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return ((codes.float() - 128) / 127 * scale).reshape(-1)[: like.numel()].view_as(like)

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        for name in ("m", "v"):
            if name not in state:
                state[name], state[f"{name}_scale"] = self.pack(torch.zeros_like(p))
        m = self.unpack(state["m"], state["m_scale"], p).lerp(g, 0.1)
        v = self.unpack(state["v"], state["v_scale"], p).lerp(g * g, 0.01).clamp_min(0)
        p.addcdiv_(m, v.sqrt().add_(1e-3), value=-group["lr"])
        state["m"], state["m_scale"] = self.pack(m)
        state["v"], state["v_scale"] = self.pack(v)


class HalfMoments(Own):
    """Adam with moments in bfloat16."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, v = zeros(state, p, "exp_avg", "exp_avg_sq", dtype=torch.bfloat16)
        m.copy_(m.float().lerp_(g.float(), 0.1))
        v.copy_(v.float().lerp_(g.float() ** 2, 0.01))
        p.add_((m.float() / (v.float().sqrt() + 1e-8)).to(p.dtype), alpha=-group["lr"])


class Kahan(Own):
    """Weights in bfloat16 with a compensation in the state."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (c,) = zeros(state, p, "compensation")
        c.add_(g, alpha=-group["lr"])
        before = p.clone()
        p.add_(c)
        c.add_(before.sub_(p))


class Masters(Own):
    """Weights in bfloat16, their float32 masters in the state."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        if "master" not in state:
            state["master"], state["exp_avg"] = p.float(), torch.zeros_like(p, dtype=torch.float32)
        state["exp_avg"].lerp_(g.float(), 0.1)
        state["master"].add_(state["exp_avg"], alpha=-group["lr"])
        p.copy_(state["master"])


class Shampoo(Own):
    """Preconditioners are lists of matrices of other shapes than the parameter."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        if "precond" not in state:
            state["precond"] = [torch.eye(n) * 1e-3 for n in p.shape]
            state["inverse"] = [torch.zeros(n, n) for n in p.shape]
        for i, n in enumerate(p.shape):
            flat = g.transpose(0, i).reshape(n, -1)
            state["precond"][i] += flat @ flat.T
            if state["step"] % 3 == 1:
                values, vectors = torch.linalg.eigh(state["precond"][i])
                state["inverse"][i] = vectors @ torch.diag(values.clamp_min(1e-6) ** (-0.5 / p.dim())) @ vectors.T
            g = (state["inverse"][i] @ g.transpose(0, i).reshape(n, -1)).view(g.transpose(0, i).shape).transpose(0, i)
        p.add_(g, alpha=-group["lr"])


class Soap(Own):
    """Adam in the basis of eigenvectors: nested states, None for vectors."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, v = zeros(state, p, "exp_avg", "exp_avg_sq")
        if "GG" not in state:
            state["GG"] = [torch.zeros(n, n) if p.dim() > 1 else [] for n in p.shape]
            state["Q"] = None
        if p.dim() > 1:
            state["GG"][0].lerp_(g @ g.T, 0.05)
            state["GG"][1].lerp_(g.T @ g, 0.05)
            if state["Q"] is None or state["step"] % 4 == 0:
                state["Q"] = [torch.linalg.qr(one + 1e-6 * torch.eye(len(one)))[0] for one in state["GG"]]
            g = state["Q"][0].T @ g @ state["Q"][1]
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.05)
        u = m / (v.sqrt() + 1e-8)
        p.add_(state["Q"][0] @ u @ state["Q"][1].T if p.dim() > 1 else u, alpha=-group["lr"])


class Prodigy(Own):
    """The distance is estimated over all parameters, in the group; the start of weights is in the state."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"d": 1e-6, "d_numerator": 0.0, "k": 0}

    def begin(self) -> None:
        group = self.param_groups[0]
        numerator, denominator = group["d_numerator"], 0.0
        for _, p, g, state in self.stepped():
            if "p0" not in state:
                state["p0"], state["s"] = p.detach().clone(), torch.zeros_like(p)
            numerator += group["d"] * torch.dot(g.flatten(), (state["p0"] - p).flatten()).item()
            state["s"].add_(g, alpha=group["d"])
            denominator += state["s"].abs().sum().item()
        group["d"] = max(group["d"], abs(numerator) / max(denominator, 1e-12)) * 1.5
        group["d_numerator"], group["k"] = numerator, group["k"] + 1

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (v,) = zeros(state, p, "exp_avg_sq")
        v.lerp_(g * g, 0.01)
        p.addcdiv_(g, v.sqrt().add_(1e-8), value=-group["d"] * group["lr"])


class ScheduleFree(Own):
    """`train()` and `eval()` swap the weights between y and x; z is in the state."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"weight_sum": 0.0, "k": 0, "train_mode": True}

    def swap(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 1 - (0.9 if to_train else 1 / 0.9))
                group["train_mode"] = to_train

    def train(self) -> None:
        self.swap(True)

    def eval(self) -> None:
        self.swap(False)

    def begin(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        if "z" not in state:
            state["z"] = p.detach().clone()
        c = group["lr"] ** 2 / group["weight_sum"]
        p.lerp_(state["z"], c)
        p.add_(g, alpha=group["lr"] * (0.9 * (1 - c) - 1))
        state["z"].sub_(g, alpha=group["lr"])


class Came(Own):
    """Factored second moments: vectors for matrices."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (m,) = zeros(state, p, "exp_avg")
        square = g * g + 1e-30
        if p.dim() > 1:
            if "row" not in state:
                state["row"], state["col"] = torch.zeros(p.shape[0]), torch.zeros(p.shape[1])
            state["row"].lerp_(square.mean(1), 0.1)
            state["col"].lerp_(square.mean(0), 0.1)
            u = g * (state["row"] / state["row"].mean()).rsqrt()[:, None] * state["col"].rsqrt()[None]
        else:
            (v,) = zeros(state, p, "exp_avg_sq")
            u = g * v.lerp_(square, 0.1).rsqrt()
        state["RMS"] = (p.norm() / math.sqrt(p.numel())).item()
        u.div_(max(1.0, (u.norm() / math.sqrt(u.numel())).item()))
        p.add_(m.lerp_(u, 0.1), alpha=-group["lr"])


class GaLore(Own):
    """Moments of the gradient's projection; the projector is an object in the state."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"rank": 2, "every": 4}

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        if p.dim() > 1:
            if (state["step"] - 1) % group["every"] == 0:
                state["projector"] = torch.linalg.svd(g)[0][:, : group["rank"]].clone()
            g = state["projector"].T @ g
        m, v = zeros(state, g, "exp_avg", "exp_avg_sq")
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.01)
        u = m / (v.sqrt() + 1e-8)
        p.add_(state["projector"] @ u if p.dim() > 1 else u, alpha=-group["lr"])


class Sophia(Own):
    """The Hessian's diagonal is estimated every few steps, outside the step."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, h = zeros(state, p, "exp_avg", "hessian")
        m.lerp_(g, 0.04)
        p.addcmul_(m.sign(), (m.abs() / (10 * h + 1e-15)).clamp_(None, 1), value=-group["lr"])

    @torch.no_grad()
    def update_hessian(self) -> None:
        for _, _, g, state in self.stepped():
            if "hessian" in state:
                state["hessian"].mul_(0.99).addcmul_(g, g, value=0.01)


class Lars(Own):
    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (m,) = zeros(state, p, "mu")
        g = g.add(p, alpha=1e-4)
        norm = g.norm()
        trust = torch.where(norm > 0, 0.1 * p.norm() / norm, torch.ones_like(norm))
        p.sub_(m.mul_(0.9).add_(g * trust), alpha=group["lr"])


class Lamb(Own):
    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, v = zeros(state, p, "exp_avg", "exp_avg_sq")
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.01)
        u = m / (v.sqrt() + 1e-6) + 0.01 * p
        p.add_(u, alpha=-group["lr"] * (p.norm().clamp(0, 10) / (u.norm() + 1e-6)).item())


class Adan(Own):
    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, d, n = zeros(state, p, "exp_avg", "exp_avg_diff", "exp_avg_sq")
        difference = g - state.get("previous", g)
        m.lerp_(g, 0.02)
        d.lerp_(difference, 0.08)
        n.lerp_((g + 0.92 * difference) ** 2, 0.01)
        p.sub_((m + 0.92 * d) / (n.sqrt() + 1e-8), alpha=group["lr"])
        state["previous"] = g.clone()


class AdamP(Own):
    """The update is projected if it is nearly radial: a decision by a norm."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, v = zeros(state, p, "exp_avg", "exp_avg_sq")
        m.lerp_(g, 0.1)
        v.lerp_(g * g, 0.01)
        u = m / (v.sqrt() + 1e-8)
        if torch.nn.functional.cosine_similarity(g.flatten(), p.flatten(), dim=0).abs() < 0.1:
            unit = p / (p.norm() + 1e-8)
            u = u - unit * (unit * u).sum()
        p.add_(u, alpha=-group["lr"])


class Ademamix(Own):
    """Two averages, and a schedule that counts in the group."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"step": 0}

    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] += 1

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        m, slow, v = zeros(state, p, "exp_avg", "exp_avg_slow", "exp_avg_sq")
        m.lerp_(g, 0.1)
        slow.lerp_(g, min(group["step"] / 100, 1) * 0.001)
        v.lerp_(g * g, 0.01)
        p.sub_((m + 5 * slow) / (v.sqrt() + 1e-8), alpha=group["lr"])


class HiddenCounter(Own):
    """What it needs to resume is an attribute, which `state_dict` does not have."""

    count = 0

    def begin(self) -> None:
        self.count += 1

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        p.add_(g, alpha=-group["lr"] / self.count)


class GlobalState(Own):
    """A state under a name, not under a parameter."""

    def begin(self) -> None:
        state = self.state["global"]  # type: ignore[index]
        state["count"] = state.get("count", 0) + 1
        state.setdefault("norms", []).append(sum(float(g.norm()) for _, _, g, _ in self.stepped()))
        state["scale"] = torch.tensor([state["norms"][-1] + 1.0])

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        p.add_(g / self.state["global"]["scale"], alpha=-group["lr"])  # type: ignore[index]


class SubclassOfAdam(torch.optim.Adam):
    """A library's subclass that adds its own decay after the base's step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_([p for p in group["params"] if p.dim() > 1], 1 - 0.01 * group["lr"])
        return loss


class Signs(Own):
    """The update depends on Python's and NumPy's random numbers."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        p.add_(g.sign(), alpha=-group["lr"] * (random.random() + float(np.random.rand())))


class EveryOther(Own):
    """Counts calls, and changes weights in every second one: accumulation inside the optimizer."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (total,) = zeros(state, p, "total")
        total.add_(g)
        if state["step"] % 2 == 0:
            p.add_(total, alpha=-group["lr"])
            total.zero_()


class GrowingHistory(Own):
    """A list of past gradients, which grows to four."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        state["history"] = [*state.get("history", []), g.clone()][-4:]
        p.add_(torch.stack(state["history"]).mean(0), alpha=-group["lr"])


class Flags(Own):
    """States of booleans, integers, texts and None."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        grows = g > 0
        same = state["grows"] == grows if state.get("grows") is not None else torch.ones_like(grows)
        state["grows"], state["mode"], state["nothing"] = grows, "warm" if state["step"] < 5 else "hot", None
        state["changes"] = state.get("changes", torch.zeros(p.shape, dtype=torch.int16)) + (~same).to(torch.int16)
        p.add_(g * same, alpha=-group["lr"])


class Wide(Own):
    """A state in float64 and one in complex64."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        (m,) = zeros(state, p, "exact", dtype=torch.float64)
        (c,) = zeros(state, p, "phase", dtype=torch.complex64)
        m.add_(g.double())
        c.add_(g * (1 + 1j))
        p.add_(m.float() + c.imag, alpha=-group["lr"])


class SharedState(Own):
    """Two parameters have the same tensor as a state."""

    def update(self, group: Any, p: Any, g: Any, state: Any) -> None:
        if "norm" not in state:
            state["norm"] = next((one["norm"] for one in self.state.values() if "norm" in one), torch.zeros(1))
        state["norm"].add_(g.norm())
        p.add_(g / state["norm"], alpha=-group["lr"])


KINDS: tuple[type, ...] = (
    *(Lion, Adam8bit, HalfMoments, Shampoo, Soap, Prodigy, ScheduleFree, Came, GaLore, Sophia, Lars, Lamb, Adan, AdamP),
    *(
        Ademamix,
        HiddenCounter,
        GlobalState,
        SubclassOfAdam,
        Signs,
        EveryOther,
        GrowingHistory,
        Flags,
        Wide,
        SharedState,
    ),
)
for kind in KINDS:
    add(f"own-{kind.__name__.lower()}", trained(lambda p, kind=kind: kind(p, lr=1e-2)))


def in_bfloat16(kind: Any) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp().bfloat16()
        optimizer = kind(model.parameters(), lr=1e-2)
        for step in run.steps(model, optimizer):
            optimizer.zero_grad()
            loss_of(model, step, next(model.parameters())).backward()
            optimizer.step()

    return body


for kind in (Lion, HalfMoments, Kahan, Masters, Lars):
    add(f"own-{kind.__name__.lower()}-bfloat16", in_bfloat16(kind))


@loop()
def own_schedule_free_with_evaluations(run: Run) -> None:
    model = mlp()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    for step in run.steps(model, optimizer):
        optimizer.train()
        run.also()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.eval()


@loop()
def own_sophia_with_hessian(run: Run) -> None:
    """The state changes after the step, by a second backward pass."""
    model = mlp()
    optimizer = Sophia(model.parameters(), lr=1e-2)
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % 3 == 1:
            optimizer.zero_grad()
            loss_of(model, 50 + step).backward()
            optimizer.update_hessian()


class Sam(torch.optim.Optimizer):
    """Two steps a batch, around a base optimizer that shares its groups and has the states."""

    needs_closure = True

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> Any:
        closure()
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


def sam(run: Run, by_steps: bool) -> None:
    model = mlp()
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    run.resumes = False
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            if by_steps:
                closure()
                optimizer.first_step()
                closure()
                optimizer.second_step()
                run.expects_warning = recorder.step != step + 1
            else:
                optimizer.step(closure)
            run.after()


@loop()
def own_sam_with_closure(run: Run) -> None:
    sam(run, by_steps=False)


@loop()
def own_sam_by_two_steps(run: Run) -> None:
    """`step` is never called: the base optimizer's is."""
    sam(run, by_steps=True)


@loop()
def own_sam_base_recorded(run: Run) -> None:
    model = mlp()
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in run.steps(model, optimizer.base_optimizer):
        for half in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            half()


class Lookahead(torch.optim.Optimizer):
    """A wrapper with an inner optimizer; slow weights every three steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.lerp_(p.data, 0.5)
                p.data.copy_(slow)
        return loss


@loop()
def own_lookahead(run: Run) -> None:
    model = mlp()
    optimizer = Lookahead(adamw(model))
    for step in run.steps(model, optimizer):
        optimizer.optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def own_master_weights_outside(run: Run) -> None:
    """Weights in bfloat16 in the model; the optimizer steps float32 copies, which are copied back."""
    model = mlp().bfloat16()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-2, fused=True)
    for step in run.steps(model, optimizer):
        loss_of(model, step, next(model.parameters())).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float() if p.grad is not None else None, None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
