"""Optimizers of packages. Each is skipped where its package is missing."""
# ruff: noqa: E501 -- tables are read along their lines

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from training_loops.optimizers import trained
from training_loops.run import Run, add, batch, loop, loss_of, mlp, train


def of(package: str, name: str, **options: Any) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        import importlib

        return getattr(importlib.import_module(package), name)(parameters, **options)

    return make


MAKES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "schedulefree-adamw": ("schedulefree", "AdamWScheduleFree", {"lr": 1e-2}),
    "schedulefree-sgd": ("schedulefree", "SGDScheduleFree", {"lr": 0.1}),
    "prodigy": ("prodigyopt", "Prodigy", {"lr": 1.0}),
    "lion": ("lion_pytorch", "Lion", {"lr": 1e-3}),
    "came": ("came_pytorch", "CAME", {"lr": 1e-3}),
    "galore": ("galore_torch", "GaLoreAdamW", {"lr": 1e-3}),
    "bnb-adamw-8bit": ("bitsandbytes.optim", "AdamW8bit", {"lr": 1e-2, "min_8bit_size": 16}),
    "bnb-lion-8bit": ("bitsandbytes.optim", "Lion8bit", {"lr": 1e-3, "min_8bit_size": 16}),
    "bnb-sgd-8bit": ("bitsandbytes.optim", "SGD8bit", {"lr": 1e-2, "momentum": 0.9, "min_8bit_size": 16}),
    "bnb-adamw-32bit": ("bitsandbytes.optim", "AdamW", {"lr": 1e-2}),
    **{
        f"library-{name.lower()}": ("pytorch_optimizer", name, {"lr": 1e-3})
        for name in (
            *("AdaBelief", "Adan", "AdamP", "ADOPT", "AdEMAMix", "Apollo", "AvaGrad", "CAME", "DAdaptAdam", "DAdaptLion"),
            *("DAdaptSGD", "DiffGrad", "FAdam", "Gravity", "Lamb", "LARS", "Lion", "MADGRAD", "MARS", "NovoGrad"),
            *("PID", "Prodigy", "QHAdam", "Ranger", "Ranger21", "ScalableShampoo", "ScheduleFreeAdamW", "SGDP", "Shampoo"),
            *("SM3", "SOAP", "StableAdamW", "SWATS", "Tiger", "Yogi", "AdaSmooth", "AggMo", "Kron", "AdamMini"),
            *("ScheduleFreeSGD", "ScheduleFreeRAdam", "Grams", "Adai", "APOLLO", "Adalite", "Amos", "Fromage"),
        )
    },
}  # fmt: skip
OPTIONS = {"library-ranger21": {"num_iterations": 20}}
for name, (package, kind, options) in MAKES.items():
    options = {**options, **OPTIONS.get(name, {})}

    def make(parameters: Any, package: str = package, kind: str = kind, options: Any = options) -> Any:
        optimizer = of(package, kind, **options)(parameters)
        if hasattr(optimizer, "train") and callable(optimizer.train):
            optimizer.train()
        return optimizer

    add(name, trained(make), (package.partition(".")[0],))


@loop("schedulefree")
def schedulefree_with_evaluations(run: Run) -> None:
    """`eval()` and `train()` swap the weights in place."""
    import schedulefree

    model = mlp()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=3)
    optimizer.train()
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        optimizer.eval()
        with torch.no_grad():
            model(batch(step))
        optimizer.train()


@loop("schedulefree")
def schedulefree_saved_in_evaluation(run: Run) -> None:
    """The iteration ends with the averaged weights, as examples save them."""
    import schedulefree

    model = mlp()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
    for step in run.steps(model, optimizer):
        optimizer.train()
        run.also()
        train(model, optimizer, step)
        optimizer.eval()


@loop("torchao")
def torchao_adamw_8bit(run: Run) -> None:
    torchao(run, "AdamW8bit")


@loop("torchao")
def torchao_adamw_4bit(run: Run) -> None:
    torchao(run, "AdamW4bit")


@loop("torchao")
def torchao_adamw_fp8(run: Run) -> None:
    torchao(run, "AdamWFp8")


@loop("torchao")
def torchao_bf16_stochastic(run: Run) -> None:
    torchao(run, "_AdamW", torch.bfloat16, bf16_stochastic_round=True)


def torchao(run: Run, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    import torchao.optim
    import torchao.optim.adam

    kind = getattr(torchao.optim, name, None) or getattr(torchao.optim.adam, name)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 3)).to(dtype)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    with torch.compiler.set_stance("force_eager"), run.record(model, optimizer):
        for step in range(4):
            train(model, optimizer, step)
            run.after()


def with_lora(run: Run, base: nn.Module) -> None:
    """Train a low-rank change of a frozen base, as QLoRA does."""
    layers = {"up": nn.Linear(7, 64), "base": base.requires_grad_(False), "low": nn.Linear(64, 2, bias=False)}
    model = nn.ModuleDict({**layers, "high": nn.Linear(2, 64, bias=False), "head": nn.Linear(64, 3)})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = model["up"](x)
        return model["head"](model["base"](h) + model["high"](model["low"](h)))

    for step in run.steps(model, optimizer, count=4):
        optimizer.zero_grad()
        loss_of(forward, step).backward()
        optimizer.step()


@loop("bitsandbytes")
def bnb_4bit_base_with_lora(run: Run) -> None:
    """The frozen base is packed into 4 bits."""
    import bitsandbytes

    torch.manual_seed(1)
    base = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
    base.load_state_dict(nn.Linear(64, 64).state_dict())
    with_lora(run, base.to("cpu"))


@loop("torchao")
def torchao_base_with_lora(run: Run) -> None:
    """The frozen base consists of codes and scales of torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(1)
    base = nn.Linear(64, 64)
    quantize_(base, Int8WeightOnlyConfig())
    with_lora(run, base)
