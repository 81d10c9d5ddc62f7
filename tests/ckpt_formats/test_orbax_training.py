"""A training goes on from JAX in torch, and from torch in JAX, as one run does."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt_formats.core.dtypes import DTYPES
from damage import ckpt as diff
from jax_jobs.launch import train_all

NEEDED = ("jax", "flax", "optax", "orbax.checkpoint", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name.partition(".")[0]) is None]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

STEPS = 2
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
CONFIG |= {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"head_dim": 16, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
CONFIG |= {"max_position_embeddings": 128}
SCALE = 4.0
"""By what MaxText divides queries: the root of 16."""


def memory(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What a process of JAX had in memory, by names of leaves."""
    data = path.with_suffix(".bin").read_bytes()
    listed = json.loads(path.read_text())
    return {
        name: np.frombuffer(data, DTYPES[dtype], int(np.prod(shape)), offset).reshape(shape)
        for name, (dtype, shape, offset) in listed.items()
    }


def go_on_in_torch(checkpoint: Path, out: Path, first: int) -> list[float]:
    """Train with transformers and torch's AdamW from a file of torch; save a file of torch. Returns the losses."""
    import torch
    import transformers

    state = torch.load(checkpoint, weights_only=True)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.load_state_dict(state["model"])
    named: list[list[tuple[str, Any]]] = [[], []]
    for name, parameter in model.named_parameters():
        named["q_proj" in name].append((name, parameter))
    # Steps in queries of 4 w are those in w, if the rate is 4 times as large, and the others a quarter.
    optimizer = torch.optim.AdamW(
        [
            {"params": own, "lr": 1e-3 * scale, "weight_decay": 0.01 / scale, "eps": 1e-8 / scale}
            for own, scale in zip(named, (1.0, SCALE), strict=True)
        ]
    )
    names = [name for own in named for name, _ in own]
    by_number = {names.index(name): own for name, own in state["optimizer"]["state"].items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})
    losses = []
    for step in range(first, first + STEPS):
        tokens = torch.from_numpy(np.random.default_rng(step).integers(0, 64, (8, 12)))
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + STEPS}, out)
    return losses


def test_training_goes_on_in_torch_and_in_jax_again(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    begin = {"start": None, "steps": STEPS, "out": tmp_path / "begin", "saved_after": STEPS, "mesh": "2"}
    train_all([{**begin, "log": tmp_path / "begin.json"}], tmp_path)

    in_torch = ckpt.use_names(ckpt.open(tmp_path / "begin"), "hf", config=config)
    ckpt.save(in_torch, tmp_path / "begin.pt", "torch")
    kernel = memory(tmp_path / "begin.end.json")["params.params.decoder.layers.self_attention.query.kernel"]
    expected = SCALE * kernel[:, 1].reshape(32, 64).T
    assert np.asarray(in_torch["model.layers.1.self_attn.q_proj.weight"]).tobytes() == expected.tobytes()
    losses = go_on_in_torch(tmp_path / "begin.pt", tmp_path / "torch.pt", STEPS)

    trained = ckpt.open(tmp_path / "torch.pt")
    in_jax = ckpt.use_names(trained, "maxtext", config=config)
    ckpt.save(in_jax, tmp_path / "again", "orbax")
    end = {"start": tmp_path / "again", "steps": STEPS, "out": None, "mesh": "1", "log": tmp_path / "end.json"}
    once = {"start": None, "steps": 3 * STEPS, "out": tmp_path / "once", "saved_after": 2 * STEPS, "mesh": "1"}
    train_all([end, {**once, "log": tmp_path / "once.json"}], tmp_path)  # one mesh: it is compiled once

    loaded = memory(tmp_path / "end.start.json")
    assert int(loaded["step"]) == int(loaded["opt_state.0.count"]) == 2 * STEPS
    for part, state in (("params.", "model"), ("opt_state.0.mu.", "exp_avg"), ("opt_state.0.nu.", "exp_avg_sq")):
        for name in in_jax:
            values = np.asarray(in_jax[name].states[state])
            assert values.tobytes() == loaded[f"{part}params.{name}"].tobytes(), (state, name)
    back = ckpt.use_names(ckpt.open(tmp_path / "again"), "hf", config=config)
    for name in trained:
        for state in ("model", "exp_avg", "exp_avg_sq"):
            assert np.array_equal(back[name].states[state], trained[name].states[state]), (name, state)
    whole = json.loads((tmp_path / "once.json").read_text())
    parts = [
        *json.loads((tmp_path / "begin.json").read_text()),
        *losses,
        *json.loads((tmp_path / "end.json").read_text()),
    ]
    np.testing.assert_allclose(parts, whole, rtol=3e-6)
    _check_differences(tmp_path, config)


def _check_differences(folder: Path, config: Path) -> None:
    """`ckpt diff` of runs of JAX and of torch, under the names of either."""
    for names, count in (("hf", 30), ("maxtext", 12)):
        options = ("--names", names, "--config", config, "--by", "state", "--json")
        report = json.loads(diff("diff", folder / "begin", folder / "begin.pt", *options, "--tensors-only").out)
        assert report["same"]
        assert len(report["tensors"]) == 3 * count
        # Two steps of torch after two of JAX, beside four of JAX.
        report = json.loads(diff("diff", folder / "once", folder / "torch.pt", *options).out)
        assert [one["name"] for one in report["tensors"] if one["kind"] not in ("equal", "changed")] == ["step"]
        relative = {group["state"]: group["relative"] for group in report["groups"]}
        assert relative.keys() == {"model", "exp_avg", "exp_avg_sq"}
        assert 0 < max(relative.values()) < 3e-6
        # What each parameter has counted is the same; JAX has its step in an array.
        assert {value["name"] for value in report["values"]} == {"opt_state", "step"}
        assert {value["kind"] for value in report["values"]} == {"extra"}
