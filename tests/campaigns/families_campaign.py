"""Random models of each family in transformers and in Megatron core: logits of both, bits there and back, and ranks.

Each round draws models of all families that Megatron core computes, translates them to Megatron and back, and compares
what both libraries compute. Models of even sizes are also resharded over random ranks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from hf_jobs.random_models import NOT_IN_MEGATRON, RANDOM, model
from run import Round
from translated_models import ON_GPUS, assert_close, assert_same_bits, by_transformers, save_models, split, translate

SEEDS = 4
"""Models of each family in a round: what starts the libraries takes longer than a model."""


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    for number in count(100 * seed):
        yield Round(f"seeds from {SEEDS * number}", partial(compare, folder / str(number), SEEDS * number))


def compare(out: Path, first: int) -> dict[str, int]:
    """The number of models of each family that both libraries compute alike."""
    out.mkdir()
    families = [family for family in RANDOM if not family.startswith(ON_GPUS) and family not in NOT_IN_MEGATRON]
    plain = [f"{family}-{seed}" for family in families for seed in range(first, first + SEEDS)]
    even = {f"{family}-{first}-even": degrees(f"{family}-{first}-even") for family in families if family != "gpt2"}
    save_models([*plain, *even], out)
    translate([*plain, *even], out)
    split(even, out)
    (out / "back").mkdir()
    reports = by_transformers({name: out / f"{name}.back" for name in plain}, out / "back")
    for name in plain:
        assert_close(out / f"{name}.megatron.pt", out / f"{name}.pt")
        assert_close(out / "back" / f"{name}.pt", out / f"{name}.pt")
        assert_same_bits(out / f"{name}.back", out / name)
        # transformers expects no layers for multi-token prediction
        problems = {key: reports[name][key] for key in ("missing_keys", "mismatched_keys") if reports[name][key]}
        assert not problems, (name, problems)
    for name in even:
        assert_close(out / f"{name}.split.pt", out / f"{name}.pt")
    return {**dict.fromkeys(families, SEEDS), "on several ranks": len(even)}


def degrees(name: str) -> str:
    """Random degrees that the model of this name and Megatron's legacy layout allow."""
    entries, rng = model(name), random.Random(json.dumps([name, "degrees"]))
    tp = rng.choice((1, 2))
    pp = rng.choice((1, 2)) if entries["num_hidden_layers"] % 2 == 0 else 1
    options = f"--tp {tp} --pp {pp}"
    if not any("experts" in key for key in entries):
        return options
    etp = 1 if entries["model_type"] == "gpt_oss" else tp  # with biases, experts cannot be split
    return f"{options} --ep {max(rng.choice((1, 2)), tp // etp)} --etp {etp}"
