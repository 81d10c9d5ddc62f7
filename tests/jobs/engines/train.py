"""Train kinds of the zoo for real: `python tests/jobs/engines/train.py OUT KIND...` (every kind if none is named).

Writes, for each, OUT/KIND/ckpt (by `engine.save_checkpoint`), truth.pt (see `truth.gather`), log.json and the ranks'
own logs. Exits 1 and names the kinds which failed; the others are complete.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import numpy
import torch
from torch import distributed

from engines import ranks
from engines.compiled import load
from engines.cuts import VOCABULARY
from engines.kinds import KINDS, ONLY_READ, Kind
from engines.run import start
from engines.truth import gather

STEPS_AFTER = 3


def client_state(kind: Kind, steps: int) -> dict[str, Any]:
    """What a user saves beside the engine's own state."""
    if kind.client_state == "bare":
        return {"iteration": steps}
    state: dict[str, Any] = {"iteration": steps}
    if not kind.experts and not kind.autotp:
        # There DeepSpeed writes this key itself, and refuses one that is given.
        state["universal_checkpoint_info"] = universal_info(kind)
    if kind.client_state == "rich":
        state |= {
            "args": argparse.Namespace(lr=0.001, data=Path("data/train"), betas=(0.9, 0.95), name="rich", seed=None),
            "random": random.Random(1).getstate(),
            "numpy_random": numpy.random.RandomState(1).get_state(),
            "numpy_scalar": numpy.float64(2.5),
            "torch_random": torch.Generator().manual_seed(1).get_state(),
            "saved_at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc),
            "seen": {"shards": {3, 1, 2}, "epochs": (0, 1), "best": {"loss": 5.25, "curve": [5.5, 5.25]}},
            "average": {"word.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3)},
        }
    return state


def universal_info(kind: Kind) -> dict[str, Any]:
    """How the model is cut, in the vocabulary of DeepSpeed's universal checkpoints."""
    if kind.model != "megatron":
        return {}
    width = kind.hidden
    queries_keys_values = (width, width // 2, width // 2)
    replicated = [r".*norm\d?\.weight", r".*\.position", r".*(out|down)\.bias"]
    if kind.pipeline:
        # The final norm is a layer like any other and has no name of its own.
        replicated += [rf"{kind.layers + 1}\.weight"]
    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY + -VOCABULARY % (4 * kind.tp),
        "vocabulary_parameter_patterns": [r".*word\.weight"],
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": [r".*(out|down)\.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up\.(weight|bias)"],
        "parameter_with_sub_params": [
            {"patterns": [r".*qkv\.weight"], "shape": (queries_keys_values, width), "partition_dim": 0},
            {"patterns": [r".*qkv\.bias"], "shape": (queries_keys_values,), "partition_dim": 0},
        ],
    }
    if kind.pipeline and kind.tied:
        # The last stage has its own table of positions, which nothing keeps equal to the first's and nothing reads.
        info["pipeline_replicated_parameter_patterns"] = [r"tied_modules\.embedding\..*"]
    return info


def train(kind: Kind, folder: Path) -> None:
    """Train, save, and train on; called in every rank."""
    run = start(kind)
    log: dict[str, Any] = {"kind": kind.name, "losses": run.train(kind.steps)}
    truth = gather(run)
    steps = run.engine.global_steps
    tag = f"global_step{steps}"
    run.engine.save_checkpoint(str(folder / "ckpt"), tag=tag, client_state=client_state(kind, steps))
    if kind.name not in ONLY_READ:
        log["evaluation"] = run.evaluate()
        log["losses_after"] = run.train(STEPS_AFTER)
    log["tag"] = tag
    log["optimizer"] = [type(run.engine.optimizer).__name__, type(run.engine.basic_optimizer).__name__]
    log["versions"] = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    if distributed.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
        (folder / "log.json").write_text(json.dumps(log, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    options = parser.parse_args()
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"no such kind: {' '.join(unknown)}")
    failed = []
    for kind in [KINDS[name] for name in options.kinds or KINDS]:
        folder = options.out.resolve() / kind.name
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        try:
            load(kind)
            ranks.run(kind.world, lambda kind=kind, folder=folder: train(kind, folder), folder)
            print(f"{kind.name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            failed.append(kind.name)
            print(f"{kind.name} FAILED: {error}", flush=True)
    if failed:
        print(f"failed: {' '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
