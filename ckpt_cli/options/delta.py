"""Options of commands that write deltas: the codec, and bounds for lossy ones."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.target import protecting
from ckpt_cli.options.types import CheckpointPath, NamedPath, ShareType, numbers
from ckpt_formats.core.arguments import Count, Increase

if TYPE_CHECKING:
    from ckpt.chains.write import DeltaPolicy
    from ckpt_formats.core.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])

STANDALONE = "standalone"
"""The preset of states without a parent."""
_PRESETS = ("resume", "balanced", "archive")
_DEFAULT = "balanced"
"""The preset if only a bound is given."""
_BOUND = click.FloatRange(min=0, min_open=True)


_STEP = click.option("--step", type=numbers(Count), help="The step, if the checkpoint states none or another one.")


@dataclass(frozen=True)
class LossOptions:
    """The options of the codec of deltas."""

    codec: str
    preset: str | None
    max_abs_err: float | None
    rel_error: float | None
    max_loss_increase: float | None
    eval_cmd: str | None
    exact: tuple[str, ...]
    no_check: bool

    def policy(self) -> "DeltaPolicy":
        """The policy. Nothing is lost unless an option allows it. Raises `UnsupportedError`."""
        from ckpt.chains.trials import Evaluation
        from ckpt.chains.write import DeltaPolicy

        policy = DeltaPolicy(self.codec, self.exact, check=not self.no_check)
        is_bounded = (self.max_abs_err, self.rel_error, self.max_loss_increase) != (None, None, None)
        is_chosen = self.codec != "auto" or self.preset is not None
        if not (is_bounded or is_chosen or self.exact):
            return policy  # imports no codec before a delta is written
        from ckpt_codecs.lossy import PRESETS

        codec = policy.delta_codec if self.preset is None else PRESETS[self.preset]
        if is_bounded:
            codec = self._bounded(codec if is_chosen else PRESETS[_DEFAULT])
        if codec.lossless and self.exact:
            raise click.UsageError("--exact is for lossy codecs: this codec is lossless.")
        evaluation = None
        if self.max_loss_increase is not None and self.eval_cmd is not None:
            evaluation = Evaluation(tuple(shlex.split(self.eval_cmd)), self.max_loss_increase)
        return replace(policy, codec=codec, evaluation=evaluation)

    def _bounded(self, codec: Any) -> Any:
        from ckpt_codecs import CodecError
        from ckpt_codecs.lossy import Subspace
        from ckpt_formats.core.errors import InvalidArgumentError

        if not isinstance(codec, Subspace):
            raise InvalidArgumentError(
                f"codec {codec.name} takes no bound for errors",
                hint=f"Leave out --codec: then {Subspace.name} is used, which takes one.",
            )
        try:
            bounded = replace(
                codec,
                max_abs_err=codec.max_abs_err if self.max_abs_err is None else self.max_abs_err,
                rel_error=codec.rel_error if self.rel_error is None else self.rel_error,
            )
        except CodecError as error:
            raise InvalidArgumentError(str(error), hint="Give a number such as 1e-4.") from None
        if self.max_loss_increase is not None and bounded.max_abs_err is not None:
            raise InvalidArgumentError(
                "--max-loss-increase searches the step size, which max_abs_err states", hint="Leave out one of them."
            )
        return bounded


@dataclass(frozen=True)
class AppendOptions:
    """How a state is appended to a chain."""

    policy: "DeltaPolicy"
    step: int | None
    parent: str | None
    """The path of a checkpoint; in a family, the name of a model."""
    name: str | None
    family: bool
    """Whether the chain is, or becomes, a family of models."""
    dry_run: bool
    protect: int | None = None
    """How many files of a state that is stored parity shall replace; None: none is written."""

    def open_parent(self) -> "Checkpoint | None":
        """The checkpoint of `--parent`, read with the options of the source."""
        from ckpt_cli.reading import open_quietly

        return None if self.parent is None else open_quietly(self.parent, click.get_current_context().meta["ckpt.read"])


@dataclass(frozen=True)
class DeltaFile:
    """The delta that `diff -o` writes."""

    output: str
    step: int | None
    policy: "DeltaPolicy"
    dry_run: bool


_LOSS = (
    click.option("--max-abs-err", type=_BOUND, metavar="X", help="Lossy: the error of each weight is at most X."),
    click.option(
        "--rel-error",
        type=_BOUND,
        metavar="X",
        help="Lossy: the norm of the error of weights is at most X times the norm of their change.",
    ),
    click.option(
        "--max-loss-increase",
        type=numbers(Increase),
        metavar="X",
        help="Lossy: the largest errors for which the loss of --eval-cmd increases by at most X.",
    ),
    click.option(
        "--eval-cmd",
        metavar="CMD",
        help="Evaluates the universal checkpoint whose path replaces {}; the last line it prints is the loss.",
    ),
    click.option("--exact", multiple=True, metavar="PATTERN", help="Parameters that a lossy codec must store exactly."),
    click.option("--no-check", is_flag=True, help="Do not decode and compare what was encoded."),
)
_CODEC = click.option(
    "--codec",
    default="auto",
    show_default=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="Codec of deltas; auto is the best lossless one.",
)
_PRESET_HELP = "Lossy: resume has the smallest errors, archive the largest."


def delta_policy(command: F) -> F:
    """The options of the codec; the command gets them as one `DeltaPolicy`. `--preset standalone` is among them."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        own = {name: arguments.pop(name) for name in LossOptions.__dataclass_fields__}
        options = LossOptions(**own)
        _check(options)
        policy = options.policy()
        if options.preset == STANDALONE:
            policy = replace(policy, base_every=1, base="coded")
        return command(*args, policy=policy, **arguments)

    preset = click.option(
        "--preset",
        type=click.Choice([*_PRESETS, STANDALONE]),
        help=f"{_PRESET_HELP} {STANDALONE}: each state without a parent.",
    )
    return cast(F, with_options(wrapper, _CODEC, preset, *_LOSS, group="Deltas"))


def append_options(command: F) -> F:
    """`--step`, `--parent`, `--tip`, `--name`, `--family`, `--protect`, `--dry-run`; with the `DeltaPolicy`, the
    command gets them as `AppendOptions`."""

    @wraps(command)
    def wrapper(
        *args: Any,
        policy: "DeltaPolicy",
        step: int | None,
        parent: str | None,
        name: str | None,
        family: bool,
        tip: bool,
        dry_run: bool,
        partial: float | None,
        protect: int | None,
        **arguments: Any,
    ) -> Any:
        _refuse(partial is not None and not 0 < partial <= 1, "--partial is a share such as 25% or 0.25.")
        _refuse(partial is not None and dry_run, "--dry-run does not estimate what --partial takes.")
        policy = replace(policy, tip=tip, partial=partial)
        return command(*args, options=AppendOptions(policy, step, parent, name, family, dry_run, protect), **arguments)

    parent_option = click.option(
        "--parent",
        type=CheckpointPath(),
        metavar="CKPT|MODEL",
        help="Read the values of the chain's last state from here, such as from the checkpoint that was appended last. "
        "ckpt compares them with the chain.  [default: the path of that checkpoint, if it is still there; else ckpt "
        "replays the chain] In a family: store the model against this one; none: alone.  [default: auto, the nearest]",
    )
    family_option = click.option(
        "--family", is_flag=True, help="Begin a family of models, each stored against the one that it is most like."
    )
    name_option = click.option(
        "--name", metavar="NAME", help="The name of the model in its family.  [default: that of its file or folder]"
    )

    dry_run = click.option(
        "--dry-run", is_flag=True, help="Check everything, estimate from some chunks what it takes, write nothing."
    )
    tip_option = click.option(
        "--tip",
        is_flag=True,
        help="Store the last state also without a parent, so that it can be read without a replay. This is always so "
        "if it is approximate.",
    )
    partial_option = click.option(
        "--partial",
        type=ShareType(),
        metavar="SHARE",
        help="Lossy: save only the blocks that moved most since they were saved, up to this share of all bytes.",
    )
    own = with_options(with_options(wrapper, _STEP, protecting, dry_run), partial_option, group="Deltas")
    own = with_options(own, family_option, name_option, group="A family of models")
    return cast(F, with_options(own, parent_option, tip_option, group="The state before"))


def delta_file(command: F) -> F:
    """`-o` and its options; the command gets them as one `DeltaFile`, or None without `-o`.

    Options of the report with `-o`, and options of the delta without it, are an error, so that none is ignored.
    """

    @wraps(command)
    def wrapper(*args: Any, output: str | None, step: int | None, dry_run: bool, **arguments: Any) -> Any:
        from ckpt_cli.options.report import ReportOptions

        own = {name: arguments.pop(name) for name in LossOptions.__dataclass_fields__}
        if output is None:
            _refuse_given((*LossOptions.__dataclass_fields__, "step", "dry_run"), "is for deltas: it needs -o.")
            return command(*args, delta=None, **arguments)
        _refuse_given(ReportOptions.__dataclass_fields__, "is for the report: it cannot be used with -o.")
        options = LossOptions(**own)
        _check(options)
        return command(*args, delta=DeltaFile(output, step, options.policy(), dry_run), **arguments)

    dry_run = click.option(
        "--dry-run", is_flag=True, help="Check everything, estimate from some chunks what a delta takes, write nothing."
    )
    output = click.option(
        "-o", "--output", type=NamedPath(), metavar="DELTA", help="Write SECOND as a delta against FIRST."
    )
    preset = click.option("--preset", type=click.Choice(_PRESETS), help=_PRESET_HELP)
    return cast(F, with_options(wrapper, output, _CODEC, preset, *_LOSS, _STEP, dry_run, group="Delta"))


def _check(options: LossOptions) -> None:
    """Raise `UsageError` for options that exclude each other, or are not valid."""
    _refuse(options.preset is not None and _is_given("codec"), "--preset chooses the codec: leave out --codec.")
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
        "--max-loss-increase searches the step size that --max-abs-err states: use one of them.",
    )
    if command is not None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise click.UsageError(f"--eval-cmd is not a valid command: {error}.") from None
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
