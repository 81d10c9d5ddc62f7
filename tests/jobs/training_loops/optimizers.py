"""All optimizers of torch, in the forms that they have."""

from collections.abc import Callable
from typing import Any

import torch

from training_loops.run import STEPS, Run, SkipLoop, add, loss_of, mlp

OPTIM = torch.optim
MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda p: OPTIM.AdamW(p, 1e-2, fused=True),
    "adamw-foreach": lambda p: OPTIM.AdamW(p, 1e-2, foreach=True),
    "adamw-for-loop": lambda p: OPTIM.AdamW(p, 1e-2, foreach=False),
    "adamw-amsgrad-maximize": lambda p: OPTIM.AdamW(p, 1e-2, fused=True, amsgrad=True, maximize=True),
    "adam-fused": lambda p: OPTIM.Adam(p, 1e-2, fused=True, weight_decay=0.1),
    "adam-foreach": lambda p: OPTIM.Adam(p, 1e-2, weight_decay=0.1),
    "adam-decoupled": lambda p: OPTIM.Adam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True, fused=True),
    "sgd-plain": lambda p: OPTIM.SGD(p, 0.1),
    "sgd-dampened": lambda p: OPTIM.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd-nesterov": lambda p: OPTIM.SGD(p, 0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: OPTIM.Adagrad(p, 0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "adagrad-fused": lambda p: OPTIM.Adagrad(p, 0.1, fused=True),
    "rmsprop": lambda p: OPTIM.RMSprop(p, 1e-2),
    "rmsprop-centered": lambda p: OPTIM.RMSprop(p, 1e-2, centered=True, momentum=0.9),
    "adadelta": lambda p: OPTIM.Adadelta(p, 1.0),
    "adamax": lambda p: OPTIM.Adamax(p, 1e-2),
    "nadam": lambda p: OPTIM.NAdam(p, 1e-2, decoupled_weight_decay=True, weight_decay=0.01),
    "radam": lambda p: OPTIM.RAdam(p, 1e-2),
    "radam-decoupled": lambda p: OPTIM.RAdam(p, 1e-2, decoupled_weight_decay=True, weight_decay=0.01, foreach=False),
    "rprop": lambda p: OPTIM.Rprop(p, 1e-2),
    "asgd": lambda p: OPTIM.ASGD(p, 1e-2, t0=4),
    "adafactor": lambda p: OPTIM.Adafactor(p, 1e-2),
    "adafactor-for-loop": lambda p: OPTIM.Adafactor(p, 1e-2, foreach=False, beta2_decay=-0.5, weight_decay=0.1),
    "muon": lambda p: OPTIM.Muon([one for one in p if one.dim() == 2], 1e-2),
    "muon-adjusted": lambda p: OPTIM.Muon([one for one in p if one.dim() == 2], 1e-2, adjust_lr_fn="match_rms_adamw"),
    "lbfgs": lambda p: OPTIM.LBFGS(p, 0.1, max_iter=2, history_size=3),
}


def trained(make: Callable[[Any], Any], steps: int = 12) -> Callable[[Run], None]:
    """A plain loop of some steps, with a closure where the optimizer needs one."""

    def body(run: Run) -> None:
        model = mlp()
        try:
            optimizer = make(list(model.parameters()))
        except (AttributeError, ImportError) as error:
            raise SkipLoop(str(error)[:80]) from None
        needs_closure = isinstance(optimizer, torch.optim.LBFGS) or getattr(optimizer, "needs_closure", False)
        with run.record(model, optimizer):
            for step in range(steps):

                def closure(step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                if needs_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
                run.after()

    return body


for name, make in MAKES.items():
    add(f"torch-{name}", trained(make))


def muon_with_adamw(run: Run) -> None:
    """Matrices by Muon, all else by AdamW, as everybody uses it."""
    model = mlp()
    matrices, others = [[p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)]
    both = [OPTIM.Muon(matrices, 1e-2), OPTIM.AdamW(others, 1e-2, fused=True)]
    with run.record(model, both):
        for step in range(STEPS):
            for optimizer in both:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            for optimizer in both:
                optimizer.step()
                run.after()


add("torch-muon-with-adamw", muon_with_adamw)
