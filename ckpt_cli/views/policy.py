"""From what the user says of a delta to how it is coded."""

import shlex
from dataclasses import replace
from pathlib import Path

import click

from ckpt.chains.append import BasePolicy
from ckpt.chains.trials import Evaluation
from ckpt.chains.write import AUTO, DeltaPolicy
from ckpt_cli.delta_options import STANDALONE, DeltaOptions
from ckpt_codecs import CodecError
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.lossy import PRESETS, Subspace
from ckpt_formats.core.errors import Unsupported

_DEFAULT = "balanced"
"""The preset of who only says how much may be lost."""


def delta_policy(writing: DeltaOptions, target: Path) -> DeltaPolicy:
    """How states are to be coded. Nothing is lost unless an option says that it may. Raises `Unsupported`."""
    manner = DeltaPolicy.of(writing.codec, writing.exact, not writing.no_check)
    codec = manner.codec if writing.preset is None else PRESETS[writing.preset]
    if (writing.max_abs_err, writing.rel_error, writing.max_loss_increase) != (None, None, None):
        chosen = writing.codec != AUTO or writing.preset is not None
        codec = _bounded(codec if chosen else PRESETS[_DEFAULT], writing)
    if codec.lossless and writing.exact:
        raise click.UsageError("--exact is of codecs that lose something: nothing is lost without it.")
    return replace(manner, codec=codec, evaluation=_evaluation(writing, target))


def base_policy(writing: DeltaOptions) -> BasePolicy:
    """Which states are to stand alone."""
    if writing.preset == STANDALONE:
        return BasePolicy(1, coded=True)
    return BasePolicy(writing.anchor_every, writing.anchor == "coded")


def _bounded(codec: DeltaCodec, writing: DeltaOptions) -> Subspace:
    if not isinstance(codec, Subspace):
        raise Unsupported(
            f"codec {codec.name} cannot be told how much to lose",
            hint=f"Leave out --codec: {Subspace.name} is taken then, which can.",
        )
    try:
        made = replace(
            codec,
            max_abs_err=codec.max_abs_err if writing.max_abs_err is None else writing.max_abs_err,
            rel_error=codec.rel_error if writing.rel_error is None else writing.rel_error,
        )
    except CodecError as error:
        raise Unsupported(str(error), hint="Give a number such as 1e-4.") from None
    if writing.max_loss_increase is not None and made.max_abs_err is not None:
        raise Unsupported(
            "--max-loss-increase looks for the step, which max_abs_err says", hint="Leave out one of them."
        )
    return made


def _evaluation(writing: DeltaOptions, target: Path) -> Evaluation | None:
    if writing.max_loss_increase is None or writing.eval_cmd is None:
        return None
    return Evaluation(tuple(shlex.split(writing.eval_cmd)), writing.max_loss_increase, target.resolve())
