"""Write the sample of Hugging Face's Trainer: `python sample_checkpoints/make_hf.py`, with transformers installed.

A folder of a real run, and beside it `*.truth.safetensors` from the live objects: keys `<parameter>/<state>`, where the
state of the weights is `param`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config

from hf_jobs.make import train
from hf_jobs.models import STEPS

HERE = Path(__file__).resolve().parent
NAME = "transformers-5.23-trainer"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # paths that the Trainer saves are relative
        train(AutoModelForCausalLM.from_config(config), Path("run"))
        truth = torch.load("run/optimizer.truth.pt")
        shutil.rmtree(HERE / NAME, ignore_errors=True)
        shutil.copytree(f"run/checkpoint-{STEPS}", HERE / NAME)
    states = {
        f"{name}/{state}": t for name, states_of_name in truth["states"].items() for state, t in states_of_name.items()
    }
    weights = {f"{name}/param": t for name, t in truth["weights"].items() if name != "lm_head.weight"}
    save_file({name: t.contiguous() for name, t in (states | weights).items()}, HERE / f"{NAME}.truth.safetensors")


if __name__ == "__main__":
    main()
