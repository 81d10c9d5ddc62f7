"""A Trainer with DeepSpeed goes on with another number of ranks: `python resume_zero.py OUT`.

One rank trains and saves `OUT/before/checkpoint-2`; `ckpt` reshards it for two ranks to `OUT/after/checkpoint-2`; two
ranks go on with that. `OUT/before.json` and `OUT/after.json` have the losses by step, and the last learning rate.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from ckpt.job import save
from ckpt_formats.engines.deepspeed import DeepSpeed
from ckpt_formats.registry.opening import open_checkpoint
from engines import ranks
from hf_jobs.make import model_of

SAVED, STEPS = 2, 4
BATCH = 4


class OneSample(Dataset):  # type: ignore[type-arg]
    """The same tokens again and again, so that no step depends on which rank reads what."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) * 3 % 64
        return {"input_ids": tokens, "labels": tokens}


def train(out: Path, checkpoint: Path | None) -> None:
    world = int(os.environ["WORLD_SIZE"])
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=BATCH // world,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        deepspeed=config,
    )
    trainer = Trainer(model=model_of("llama_tied").train(), args=arguments, train_dataset=OneSample())
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if os.environ["RANK"] == "0":
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        rates = {entry["step"]: entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry}
        out.with_suffix(".json").write_text(json.dumps({"losses": losses, "rates": rates}))


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    before, after = out / "before", out / "after"
    ranks.run(1, lambda: train(before, None), out / "log-before")
    after.mkdir()
    name = f"checkpoint-{SAVED}"
    save(open_checkpoint(before / name), after / name, DeepSpeed(dp=2))
    ranks.run(2, lambda: train(after, after / name), out / "log-after")


if __name__ == "__main__":
    main()
