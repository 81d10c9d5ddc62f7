"""From the options of a parameter group, as the optimizer had them at a step, to the arithmetic of that step."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import Adagrad, Adam, DeepSpeedCpuAdam, Lion, OptimizerStep, Sgd
from ckpt_formats.core.errors import Corrupt, Unsupported
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.layout import LoggedOptimizer

Options = Mapping[str, Value]
Make = Callable[[Options], OptimizerStep]
ENTRY_POINTS = "ckpt.optimizers"
"""Where other packages offer a method: a function of the optimizer's class, by name, and a group's options."""


def _beta(value: Value) -> float:
    beta = float(value)
    if not 0 <= beta < 1:
        raise ValueError(f"a beta of {beta}")
    return beta


def _adam(options: Options) -> OptimizerStep:
    beta1, beta2 = options["betas"]
    return Adam(
        lr=float(options["lr"]),
        betas=(_beta(beta1), _beta(beta2)),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        decoupled_weight_decay=bool(options["decoupled_weight_decay"]),
        amsgrad=bool(options.get("amsgrad", False)),
        maximize=bool(options.get("maximize", False)),
    )


def _sgd(options: Options) -> OptimizerStep:
    return Sgd(
        lr=float(options["lr"]),
        momentum=float(options["momentum"]),
        dampening=float(options["dampening"]),
        weight_decay=float(options["weight_decay"]),
        nesterov=bool(options["nesterov"]),
        maximize=bool(options.get("maximize", False)),
    )


def _adagrad(options: Options) -> OptimizerStep:
    return Adagrad(
        lr=float(options["lr"]),
        lr_decay=float(options["lr_decay"]),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        maximize=bool(options.get("maximize", False)),
    )


def _lion(options: Options) -> OptimizerStep:
    beta1, beta2 = options["betas"]
    return Lion(
        lr=float(options["lr"]), betas=(_beta(beta1), _beta(beta2)), weight_decay=float(options["weight_decay"])
    )


def _adam_deepspeed_cpu(options: Options) -> OptimizerStep:
    beta1, beta2 = options["betas"]
    return DeepSpeedCpuAdam(
        lr=float(options["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        adamw_mode=bool(options["adamw_mode"]),
        bias_correction=bool(options["bias_correction"]),
        powers_from=int(options.get("powers_from", 0)),
    )


METHODS: dict[str, Make] = {
    "adam-fused": _adam,
    "sgd": _sgd,
    "adagrad-fused": _adagrad,
    "lion": _lion,
    "adam-deepspeed-cpu": _adam_deepspeed_cpu,
}
"""By the name that `layout.json` gives them. These need no torch."""


def step_of(optimizer: LoggedOptimizer, options: Options, where: Path) -> OptimizerStep:
    """The step that an optimizer did for a group with these options.

    Raises `Unsupported` for a method that is not installed, `Corrupt` for options that are missing or senseless.
    """
    try:
        make = METHODS.get(optimizer.method)
        return make(options) if make is not None else _offered(optimizer, where)(optimizer.type, options)
    except (KeyError, TypeError, ValueError, OverflowError, CodecError) as error:
        raise Corrupt(f"the options of a group are not those of {optimizer.method}: {error}", where=where) from None


def _offered(optimizer: LoggedOptimizer, where: Path) -> Callable[[str, Options], OptimizerStep]:
    from importlib.metadata import entry_points

    for offered in entry_points(group=ENTRY_POINTS, name=optimizer.method):
        try:
            load: Callable[[str, Options], OptimizerStep] = offered.load()
        except ImportError as error:
            raise _missing(optimizer, where, str(error)) from None
        return load
    raise _missing(optimizer, where, "no installed package offers it")


def _missing(optimizer: LoggedOptimizer, where: Path, why: str) -> Unsupported:
    return Unsupported(
        f"the steps of {optimizer.type} are done again by {optimizer.method!r}: {why}",
        where=where,
        hint="`torch` steps whatever ckpt cannot step itself: pip install 'ckpt-suite[recorder]'.",
    )
