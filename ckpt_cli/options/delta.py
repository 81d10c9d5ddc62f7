"""Options of commands that write deltas: with which codec, and how much may be lost."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from ckpt.chains.write import DeltaPolicy

F = TypeVar("F", bound=Callable[..., Any])

STANDALONE = "standalone"
"""The preset that has no parent."""
_PRESETS = ("resume", "balanced", "archive")
_DEFAULT = "balanced"
"""The preset where only a bound is given."""
_BOUND = click.FloatRange(min=0, min_open=True)

step = click.option(
    "--step", type=click.IntRange(0, 1 << 62), help="The step, if not the one that the checkpoint states."
)


@dataclass(frozen=True)
class LossOptions:
    """How deltas are encoded, as the options state it."""

    codec: str
    preset: str | None
    max_abs_err: float | None
    rel_error: float | None
    max_loss_increase: float | None
    eval_cmd: str | None
    exact: tuple[str, ...]
    no_check: bool

    def policy(self) -> "DeltaPolicy":
        """The policy. Nothing is lost unless an option allows it. Raises `Unsupported`."""
        from ckpt.chains.trials import Evaluation
        from ckpt.chains.write import DeltaPolicy
        from ckpt_codecs.lossy import PRESETS

        policy = DeltaPolicy(self.codec, self.exact, check=not self.no_check)
        codec = policy.delta_codec if self.preset is None else PRESETS[self.preset]
        if (self.max_abs_err, self.rel_error, self.max_loss_increase) != (None, None, None):
            chosen = self.codec != "auto" or self.preset is not None
            codec = self._bounded(codec if chosen else PRESETS[_DEFAULT])
        if codec.lossless and self.exact:
            raise click.UsageError("--exact is for codecs that lose something: nothing is lost without it.")
        evaluation = None
        if self.max_loss_increase is not None and self.eval_cmd is not None:
            evaluation = Evaluation(tuple(shlex.split(self.eval_cmd)), self.max_loss_increase)
        return replace(policy, codec=codec, evaluation=evaluation)

    def _bounded(self, codec: Any) -> Any:
        from ckpt_codecs import CodecError
        from ckpt_codecs.lossy import Subspace
        from ckpt_formats.core.errors import Unsupported

        if not isinstance(codec, Subspace):
            raise Unsupported(
                f"codec {codec.name} takes no bound of what may be lost",
                hint=f"Leave out --codec: {Subspace.name} is taken then, which does.",
            )
        try:
            bounded = replace(
                codec,
                max_abs_err=codec.max_abs_err if self.max_abs_err is None else self.max_abs_err,
                rel_error=codec.rel_error if self.rel_error is None else self.rel_error,
            )
        except CodecError as error:
            raise Unsupported(str(error), hint="Give a number such as 1e-4.") from None
        if self.max_loss_increase is not None and bounded.max_abs_err is not None:
            raise Unsupported(
                "--max-loss-increase searches the step size, which max_abs_err states", hint="Leave out one of them."
            )
        return bounded


@dataclass(frozen=True)
class DeltaFile:
    """The delta that `diff -o` writes."""

    output: str
    step: int | None
    policy: "DeltaPolicy"
    dry_run: bool


_LOSS = (
    click.option("--no-check", is_flag=True, help="Do not decode again, and compare, what was encoded."),
    click.option(
        "--exact", multiple=True, metavar="PATTERN", help="Parameters in which a lossy codec may lose nothing."
    ),
    click.option(
        "--eval-cmd",
        metavar="CMD",
        help="Evaluates the universal checkpoint whose path replaces {}; the last line it prints is the loss.",
    ),
    click.option(
        "--max-loss-increase",
        type=click.FloatRange(min=0),
        metavar="X",
        help="Lose as much as --eval-cmd accepts: a loss that is higher by at most X.",
    ),
    click.option(
        "--rel-error",
        type=_BOUND,
        metavar="X",
        help="Lose something: the error of weights has at most X times the norm of their change.",
    ),
    click.option("--max-abs-err", type=_BOUND, metavar="X", help="Lose something: no weight is off by more than X."),
)
_CODEC = click.option(
    "--codec",
    default="auto",
    show_default=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="Codec of deltas; auto is the best that loses nothing.",
)
_PRESET_HELP = "Lose something: the less, the sooner training goes on from it."


def delta_policy(command: F) -> F:
    """The options of the codec; the command gets them as one `DeltaPolicy`. `--preset standalone` is among them."""

    @wraps(command)
    def gathered(*args: Any, **others: Any) -> Any:
        own = {name: others.pop(name) for name in LossOptions.__dataclass_fields__}
        options = LossOptions(**own)
        _check(options)
        policy = options.policy()
        if options.preset == STANDALONE:
            policy = replace(policy, base_every=1, base="coded")
        return command(*args, policy=policy, **others)

    preset = click.option(
        "--preset",
        type=click.Choice([*_PRESETS, STANDALONE]),
        help=f"{_PRESET_HELP} {STANDALONE}: each state without a parent.",
    )
    return cast(F, _with(gathered, (*_LOSS, preset, _CODEC)))


def delta_file(command: F) -> F:
    """`-o` and what goes with it; the command gets them as one `DeltaFile`, or None.

    Options of the report and of the delta do not go together, so that none is passed over in silence.
    """

    @wraps(command)
    def gathered(*args: Any, output: str | None, step: int | None, dry_run: bool, **others: Any) -> Any:
        from ckpt_cli.options.report import ReportOptions

        own = {name: others.pop(name) for name in LossOptions.__dataclass_fields__}
        if output is None:
            _refuse_given((*LossOptions.__dataclass_fields__, "step", "dry_run"), "is for deltas: it goes with -o.")
            return command(*args, delta=None, **others)
        report = (*ReportOptions.__dataclass_fields__, "only", "skip")
        _refuse_given(report, "is for the report: it does not go with -o.")
        options = LossOptions(**own)
        _check(options)
        return command(*args, delta=DeltaFile(output, step, options.policy(), dry_run), **others)

    dry_run = click.option(
        "--dry-run", is_flag=True, help="Check everything, estimate from some chunks what a delta takes, write nothing."
    )
    output = click.option(
        "-o", "--output", type=click.Path(), metavar="DELTA", help="Write SECOND as a delta against FIRST."
    )
    preset = click.option("--preset", type=click.Choice(_PRESETS), help=_PRESET_HELP)
    return cast(F, _with(gathered, (dry_run, step, *_LOSS, preset, _CODEC, output)))


def _check(options: LossOptions) -> None:
    """Raises `UsageError` for options that do not go together."""
    _refuse(
        options.preset is not None and _is_given("codec"), "--preset is a codec with its options: leave out --codec."
    )
    increase, command = options.max_loss_increase, options.eval_cmd
    _refuse((increase is None) != (command is None), "--max-loss-increase and --eval-cmd need each other.")
    bounds = {
        "--max-loss-increase": increase,
        "--max-abs-err": options.max_abs_err,
        "--rel-error": options.rel_error,
    }
    infinite = next((flag for flag, bound in bounds.items() if not isfinite(bound or 0)), None)
    _refuse(infinite is not None, f"{infinite} is a number such as 0.01.")
    _refuse(
        None not in (increase, options.max_abs_err),
        "--max-loss-increase searches the step size that --max-abs-err states: give one of them.",
    )
    if command is not None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise click.UsageError(f"--eval-cmd is no command: {error}.") from None
        _refuse(not any("{}" in word for word in words), "--eval-cmd needs {} where the path of the state goes.")


def _refuse_given(names: Any, reason: str) -> None:
    context = click.get_current_context()
    flags = {parameter.name: parameter.opts[-1] for parameter in context.command.params}
    given = next((flags[name] for name in names if name in flags and _is_given(name)), None)
    _refuse(given is not None, f"{given} {reason}")


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise click.UsageError(message)


def _with(command: Any, options: Any) -> Any:
    for option in options:
        command = option(command)
    return command
