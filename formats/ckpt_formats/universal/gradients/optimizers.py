"""The arithmetic of a step, from the options that a parameter group had at that step."""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import Adagrad, Adam, DeepSpeedCpuAdam, Lion, OptimizerStep, Sgd
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.layout import LoggedOptimizer

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Options = Mapping[str, Value]
Make = Callable[[Options], OptimizerStep]
ENTRY_POINTS = "ckpt.optimizers"
"""The entry points of methods in other packages: functions of the class name of an optimizer and a group's options.

If values are not float32 or tensors are stepped as wholes, two more arguments are the name of the dtype, and the number
of threads, or None."""


def _beta(value: Value) -> float:
    beta = float(value)
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta}")
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
"""The methods by their names in `layout.json`. These do not need torch."""


def step_of(optimizer: LoggedOptimizer, options: Options, where: Path, dtype: str = "float32") -> OptimizerStep:
    """The step of an optimizer for a group with these options. `dtype`: that of the values that it steps.

    Raises `UnsupportedError` if the method is not installed, and `CorruptError` if options are missing or not valid.
    """
    try:
        make = METHODS.get(optimizer.method)
        is_plain = dtype == "float32" and optimizer.threads is None
        if make is not None:
            if not is_plain:
                raise ValueError(f"it steps parts of float32 tensors, not whole ones, and no {dtype}")
            return make(options)
        others = () if is_plain else (dtype, optimizer.threads)
        return _load_entry_point(optimizer, where)(optimizer.type, options, *others)
    except (KeyError, TypeError, ValueError, OverflowError, CodecError) as error:
        raise CorruptError(
            f"the options of a group do not fit the method {optimizer.method}: {error}", where=where
        ) from None


def _load_entry_point(optimizer: LoggedOptimizer, where: Path) -> Callable[..., OptimizerStep]:
    path = tuple(sys.path)
    if all(one.name != optimizer.method for one in _entries(path)):
        _entries.cache_clear()  # its package may have been installed since
    entry_point = next((one for one in _entries(path) if one.name == optimizer.method), None)
    if entry_point is None:
        raise _missing(optimizer, where, "no installed package provides it")
    try:
        load: Callable[..., OptimizerStep] = entry_point.load()
    except ImportError as error:
        raise _missing(optimizer, where, str(error)) from None
    return load


@cache
def _entries(path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    """The methods that installed packages name. To look for them takes some 40 ms, and each tensor asks at each step.

    `path`: where packages are.
    """
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def _missing(optimizer: LoggedOptimizer, where: Path, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the method {optimizer.method!r}, which replays the steps of {optimizer.type}, is missing: {why}",
        where=where,
        hint="The method `torch` needs torch: pip install 'ckpt-suite[recorder]'.",
    )
