"""Runs of real Megatron core go on at other numbers of ranks, with losses and states of Megatron's own load.

Each round reshards files of Megatron with ckpt, for a pair of a model and a cut, and lets Megatron train on for four
steps: from ours, and from its own, which it reshards itself. Every bit must be the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import megatron_jobs.launch
from megatron_trained import Change, assert_trains_the_same, train
from run import Round

MODELS = ("deepseek", "deepseek_tp2_pp2", "deepseek_tp2_ep2", "llama_tp2_pp2", "moe", "moe_ep2")
CUTS = [(tp, pp, ep, dp) for tp in (1, 2) for pp in (1, 2) for ep, dp in ((1, 1), (1, 2), (2, 2))]


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    megatron_jobs.launch.save(MODELS, folder / "saved")
    rng = random.Random(seed)
    for number in count():
        changes = [Change(model, *cut) for model in MODELS for cut in CUTS if cut[2] == 1 or "llama" not in model]
        for change in rng.sample(changes, len(changes)):
            name = f"{change.kind} {change.options} {number}"
            yield Round(name, partial(compare, change, folder / name.replace(" ", ""), folder / "saved"))


def compare(change: Change, out: Path, saved: Path) -> dict[str, int]:
    """Raise `AssertionError` for a loss or a state that differs."""
    out.mkdir()
    train({"run": change}, saved, out)
    assert_trains_the_same(change, "run", out)
    return {"as by Megatron" if change.by_megatron == change else "first loss alone": 1}
