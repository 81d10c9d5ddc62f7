"""Quantised models against transformers: plain weights are those that it computes itself, and it loads ckpt's codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.job import save
from ckpt_formats.registry.opening import open_checkpoint
from late import Late

transformers: Any = Late("transformers")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def loaded(folder: Path, quantisation: Any = None) -> dict[str, torch.Tensor]:
    options = {} if quantisation is None else {"quantization_config": quantisation}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return dict(model.state_dict())


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    unequal = [name for name in mine if not torch.equal(mine[name].nan_to_num(7), theirs[name].nan_to_num(7))]
    assert (unequal, {mine[name].dtype == theirs[name].dtype for name in mine}) == ([], {True})


def test_model_in_fp8_blocks_has_the_weights_that_transformers_dequantises(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 128, "vocab_size": 64}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    save(open_checkpoint(tmp_path / "plain").quantise("fp8-block"), tmp_path / "fp8", "hf")
    assert load_file(tmp_path / "fp8" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    save(open_checkpoint(tmp_path / "fp8").cast("bf16"), tmp_path / "back", "hf")
    theirs = loaded(tmp_path / "fp8", transformers.FineGrainedFP8Config(dequantize=True))
    assert_equal(loaded(tmp_path / "back"), theirs)
    name = "model.layers.0.mlp.up_proj.weight"
    error = (theirs[name].float() - model.state_dict()[name].float()).norm() / model.state_dict()[name].float().norm()
    assert 0.001 < float(error) < 0.05


def test_model_in_mxfp4_has_the_weights_that_transformers_dequantises(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.GptOssConfig(**sizes, **heads), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "oss")
    save(open_checkpoint(tmp_path / "oss").quantise("mxfp4"), tmp_path / "codes", "hf")
    save(open_checkpoint(tmp_path / "codes").cast("bf16"), tmp_path / "rounded", "hf")
    dequantise = transformers.Mxfp4Config(dequantize=True)
    assert_equal(loaded(tmp_path / "rounded"), loaded(tmp_path / "codes", dequantise))
    tensors = load_file(tmp_path / "oss" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, shape, dtype=torch.uint8)
    save_file(tensors, tmp_path / "oss" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "oss" / "config.json").read_text())
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (tmp_path / "oss" / "config.json").write_text(json.dumps(config))
    save(open_checkpoint(tmp_path / "oss").cast("bf16"), tmp_path / "plain", "hf")
    assert_equal(loaded(tmp_path / "plain"), loaded(tmp_path / "oss", dequantise))
