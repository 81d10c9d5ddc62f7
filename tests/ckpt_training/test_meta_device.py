"""Models that are built without memory: whoever can make a buffer makes it, and what nobody makes is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_training.engines.meta_device import materialize, on_meta
from late import Late

transformers: Any = Late("transformers")
CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {**SIZES, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "yarn": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=YARN),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=4),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_of_transformers_are_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.device("meta"):
        other = transformers.AutoModelForCausalLM.from_config(config).eval()
    parameters = list(other.parameters())
    assert materialize(other, CPU) == []
    assert not on_meta(other)
    assert all(one is two for one, two in zip(other.parameters(), parameters, strict=True))
    other.load_state_dict(model.state_dict())
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, model(tokens).logits)


class Scaled(nn.Module):
    """With a buffer that `reset_parameters` makes in part, and one that it makes in full."""

    def __init__(self, partial: bool) -> None:
        super().__init__()
        self.partial = partial
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("seen", torch.zeros(2))
        self.table = torch.ones(2)

    def reset_parameters(self) -> None:
        self.scale[1 if self.partial else 0 :] = 2.0


def test_buffers_that_nobody_makes_in_full_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled(False), Scaled(True))
    assert materialize(model, CPU) == ["0.table", "1.table", "1.scale"]
    assert model[0].scale.tolist() == [2.0] * 4


def test_parameters_with_values_are_not_made_anew() -> None:
    module = Scaled(False)
    module.register_parameter("weight", nn.Parameter(torch.zeros(3)))
    module.scale = module.scale.to("meta")
    assert materialize(module, CPU) == ["scale"]
    assert module.weight.tolist() == [0.0] * 3


def test_optimizers_and_ties_refer_to_the_same_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = torch.random.get_rng_state()
    assert materialize(model, CPU) == []
    assert torch.equal(torch.random.get_rng_state(), state)
    nn.init.ones_(model[0].weight)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model[1].weight is optimizer.param_groups[0]["params"][0]
    assert model[1].weight.tolist() == [[-5.0] * 3] * 3
