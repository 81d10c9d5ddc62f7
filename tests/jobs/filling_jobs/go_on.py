"""Load what engines saved into fresh runs, and train on.

The kinds are those of `recording_jobs`. OUT/KIND/saved is what the engine saves after some steps. OUT/KIND/WAY.json has
the losses of the steps that follow: of that run (`whole`), of one with other weights that the engine itself loads
(`own`), of one that `load` loads (`loaded`), and of one whose model alone it loads (`alone`). `scalers` has what `load`
says instead of a loss scaler that is missing, and of one that is not valid.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed

import ckpt
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.state_names import MODEL
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_training import load
from engines import ranks
from recording_jobs.kinds import Kind
from recording_jobs.run import start
from recording_jobs.train import joining

BEFORE, AFTER = 3, 3


def whole(kind: Kind, saved: Path) -> list[float]:
    run: Any = start(kind)
    run.train(BEFORE)
    run.save(saved)
    losses: list[float] = run.train(AFTER)
    return losses


def own(kind: Kind, saved: Path) -> list[float]:
    run: Any = start(kind, seed=1)
    run.load(saved)
    losses: list[float] = run.train(AFTER)
    return losses


def loaded(kind: Kind, saved: Path) -> list[float]:
    run: Any = start(kind, seed=1)
    stored = ckpt.open(saved).extras
    parts = {name: one for name, one in run.notes().items() if hasattr(one, "load_state_dict") and name in stored}
    load(saved, run.model, run.optimizer, **parts)
    if hasattr(run, "step"):
        run.step = BEFORE
    if kind.divided:
        run.scheduler.last_epoch = BEFORE  # its file has no schedule
    losses: list[float] = run.train(AFTER)
    return losses


def alone(kind: Kind, saved: Path) -> list[float]:
    """The loss of the next step alone: the optimizer gets nothing."""
    run: Any = start(kind, seed=1)
    load(ckpt.open(saved).weights_only(), run.model)
    run.step = BEFORE
    losses: list[float] = run.train(1)
    return losses


def scalers(kind: Kind, saved: Path) -> list[str]:
    """What `load` says of a checkpoint without a loss scaler, and of one whose scale is infinite."""
    run: Any = start(kind, seed=1)
    source = ckpt.open(saved)
    before = run.optimizer.get_loss_scale()
    texts = list(load(replace(source, extras={}), run.model, run.optimizer).notices)
    name = source.extras["optimizer"]["grad_scaler"]["scale"].name
    scale = replace(source.parameters[name], states={MODEL: Tensor.of(ArrayBlob(np.array([np.inf], np.float32)))})
    hostile = replace(source, parameters={**source.parameters, name: scale})
    try:
        load(hostile, run.model, run.optimizer)
    except CorruptError as error:
        texts += [error.what, str(error.hint)]
    assert run.optimizer.get_loss_scale() == before
    return texts


WAYS: dict[str, Callable[[Kind, Path], list[Any]]] = {
    "whole": whole,
    "own": own,
    "loaded": loaded,
    "alone": alone,
    "scalers": scalers,
}


def go_on(kind: Kind, ways: list[str], folder: Path) -> None:
    """Train in all ways, each in processes of its own."""
    for way in ways:

        def work(way: str = way) -> None:
            losses = WAYS[way](kind, folder / "saved")
            if distributed.get_rank() == kind.world - 1:  # a pipeline's last stage has the losses
                (folder / f"{way}.json").write_text(json.dumps(losses))

        ranks.run(kind.world, work, folder / way, join=joining(kind))
