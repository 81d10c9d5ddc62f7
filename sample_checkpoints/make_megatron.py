"""Write the samples of Megatron core: `python sample_checkpoints/make_megatron.py`, with torch and megatron-core.

One run of a small Llama in bf16, tp 2 x pp 2, with the distributed optimizer, in both layouts, each with
`truth.safetensors` as Megatron itself loads it whole (keys `<name>/<state>`, the weights under `param`); and in
damaged/ a run whose optimizer states Megatron has saved shifted.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

from safetensors.torch import save_file

from megatron_jobs import launch
from megatron_jobs.truth import read_truth

HERE = Path(__file__).resolve().parent
KIND, SHIFTED = "llama_tp2_pp2", "gpt_dp3_buckets"
SAMPLES = {"megatron-0.16-tp2-pp2-legacy": "legacy", "megatron-0.16-tp2-pp2-dist": "fully"}
DAMAGED = "megatron-shifted-optimizer"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch)
        launch.save([KIND, SHIFTED], runs)
        truth = read_truth(runs / KIND / "truth.pt")
        whole = {f"{name}/{state}": values.clone() for (name, state), values in truth.items()}
        for sample, saved in SAMPLES.items():
            shutil.rmtree(HERE / sample, ignore_errors=True)
            shutil.copytree(runs / KIND / saved, HERE / sample)
            save_file(whole, HERE / sample / "truth.safetensors")
        shutil.rmtree(HERE / "damaged" / DAMAGED, ignore_errors=True)
        shutil.copytree(runs / SHIFTED / "fully", HERE / "damaged" / DAMAGED)


if __name__ == "__main__":
    main()
