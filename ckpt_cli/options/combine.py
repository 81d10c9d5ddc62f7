"""Checkpoints that are computed from several others: their arguments, and how they are combined."""

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.source import Choice, only, skip, source
from ckpt_cli.options.types import FloatType, WeightsType, numbers
from ckpt_formats.core.arguments import Decay
from ckpt_formats.core.text import counted

if TYPE_CHECKING:
    from ckpt.combine.convert_experts import ExpertLayout, GateUpRows
    from ckpt.combine.experts import ExpertAxes
    from ckpt_formats.core.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])

_WEIGHTS = click.option(
    "--weights",
    type=WeightsType(),
    metavar="W,W,...",
    help="A weight for each CKPT, such as 1,2,1; they are divided by their sum.  [default: all the same]",
)
_EMA = click.option(
    "--ema",
    type=numbers(Decay),
    metavar="DECAY",
    help="Exponential moving average, the oldest CKPT first: DECAY * average + (1 - DECAY) * next.",
)
_LAST = click.option(
    "--last",
    type=click.IntRange(2),
    metavar="N",
    help="Average the N newest checkpoints of CKPT, which is the folder of a run or a chain.",
)
_DTYPE = click.option(
    "--dtype",
    type=FloatType(),
    metavar="TYPE",
    help="Type of the result: fp32, bf16, fp16, ...; a wider one than the weights' own is computed without rounding "
    "before.  [default: the weights' own]",
)
_SCALE = click.option(
    "--scale",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Factor for the scale of each low-rank update, which is lora_alpha / r.",
)
_EXPERT_AXES = click.option(
    "--expert-axes",
    type=click.Choice(["out-in", "in-out"]),
    help="How MODEL stores the weights of its experts. Needed only if they are square.",
)
_EXPERT_LORA = click.option(
    "--expert-lora",
    type=click.Choice(["per-expert", "peft", "stacked", "shared"]),
    help="For an adapter of PEFT: store its updates of experts in this layout.",
)
_GATE_UP = click.option(
    "--gate-up",
    type=click.Choice(["halves", "in-turn"]),
    help="How one matrix has the rows of gate and up, if --expert-lora splits or joins them.",
)


def averaged(command: F) -> F:
    """`CKPT...`, `--weights`, `--ema`, `--only` and `--skip`; the command gets the average as `source`."""

    @wraps(command)
    def combined(
        *args: Any,
        checkpoints: "tuple[Checkpoint, ...]",
        weights: tuple[float, ...] | None,
        ema: float | None,
        last: int | None,
        dtype: str | None,
        only: tuple[str, ...],
        skip: tuple[str, ...],
        **arguments: Any,
    ) -> Any:
        from ckpt.combine import average
        from ckpt_cli.reading import noted

        if last is not None and len(checkpoints) != last:
            raise click.UsageError("--last chooses among the checkpoints of one folder or chain: name only that.")
        if len(checkpoints) == 1:
            raise click.UsageError(
                "an average needs several checkpoints, or a chain with several states; one is given."
            )
        numbers = _weights(len(checkpoints), weights, ema)
        selected = [one.select(only, skip) if only or skip else one for one in checkpoints]
        result = average([_widened(one, dtype) for one in selected], numbers)
        return command(*args, source=noted(result.cast(dtype) if dtype else result), **arguments)

    grouped = with_options(combined, _WEIGHTS, _EMA, _LAST, _DTYPE, only, skip, group="Average")
    return cast(F, source("checkpoints", several="CKPT...")(grouped))


def merged_lora(command: F) -> F:
    """`MODEL`, `ADAPTER`, `--scale`, `--expert-axes`, `--only`, `--skip`; the command gets the model as `source`."""

    @wraps(command)
    def combined(
        *args: Any,
        model: "Checkpoint",
        adapter: "Checkpoint",
        scale: float,
        expert_axes: "ExpertAxes | None",
        dtype: str | None,
        only: tuple[str, ...],
        skip: tuple[str, ...],
        **arguments: Any,
    ) -> Any:
        from ckpt.combine import merge_lora
        from ckpt_cli.reading import noted, withdraw_missing_base

        withdraw_missing_base()
        if not math.isfinite(scale):
            raise click.UsageError("--scale is a number such as 0.5.")
        merged = merge_lora(_widened(model, dtype), adapter, scale, expert_axes=expert_axes)
        result = Choice(only, skip).of(merged)  # after the merge, which needs all weights that the adapter changes
        return command(*args, source=noted(result.cast(dtype) if dtype else result), **arguments)

    grouped = with_options(combined, _SCALE, _EXPERT_AXES, _DTYPE, only, skip, group="Merge")
    return cast(F, source("model", "adapter")(grouped))


def converted_experts(command: F) -> F:
    """`--expert-lora` and `--gate-up`; the command gets the adapter in the other layout as `source`."""

    @wraps(command)
    def converted(
        *args: Any,
        source: "Checkpoint",
        expert_lora: "ExpertLayout | None",
        gate_up: "GateUpRows | None",
        **arguments: Any,
    ) -> Any:
        if gate_up is not None and expert_lora is None:
            raise click.UsageError("--gate-up is about the layout of --expert-lora: give --expert-lora, too.")
        if expert_lora is not None:
            from ckpt.combine import convert_lora

            source = convert_lora(source, expert_lora, gate_up)
        return command(*args, source=source, **arguments)

    return cast(F, with_options(converted, _EXPERT_LORA, _GATE_UP, group="Edits"))


def _widened(source: "Checkpoint", dtype: str | None) -> "Checkpoint":
    """The checkpoint with its weights in `dtype`, if that type holds each of their values; else as it is."""
    from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, is_float

    if dtype is None:
        return source
    dtype = SHORT_NAMES.get(dtype, dtype)
    weights = [parameter.dtype for parameter in source.values() if is_float(parameter.dtype)]
    wider = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}.get(dtype, ())
    fits = all(one == DTYPES[dtype] or one.name in wider for one in weights)
    return source.cast(dtype) if fits and any(one != DTYPES[dtype] for one in weights) else source


def _weights(count: int, weights: tuple[float, ...] | None, decay: float | None) -> list[float] | None:
    """The weights of so many checkpoints; None: all are the same. Raises `UsageError`."""
    from ckpt.combine import ema_weights

    if weights is not None and decay is not None:
        raise click.UsageError("--weights and --ema both state the weights: give one of them.")
    if decay is not None:
        if math.isnan(decay):
            raise click.UsageError("--ema is a number such as 0.9.")
        return ema_weights(count, decay)
    if weights is not None and len(weights) != count:
        raise click.UsageError(
            f"--weights has {counted(len(weights), 'number')} for {count} checkpoints: give one for each."
        )
    if weights is not None and math.fsum(weights) <= 0:
        raise click.UsageError("the sum of --weights must be above zero.")
    return None if weights is None else list(weights)
