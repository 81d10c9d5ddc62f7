"""Models of transformers that follow a chain: in place and from the served folder, with the bits and tokens of a model
that is loaded whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt import Follower
from ckpt.following.follow import follow_into
from followed_weights import bytes_of_torch
from published import PublishedRun

pytestmark = [pytest.mark.engines]
STEPS = range(1, 4)


@pytest.mark.parametrize("tied", [False, True])
def test_model_follows_in_place_and_from_the_folder(tmp_path: Path, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    trained, live = (transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval() for _ in range(2))
    optimizer = torch.optim.SGD(trained.parameters(), 0.05)
    prompt = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    # What a tied model saves: each tensor once.
    names = [name for name in trained.state_dict() if not (tied and name == "lm_head.weight")]
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def weights() -> dict[str, np.ndarray[Any, Any]]:
        import ml_dtypes

        states = trained.state_dict()
        return {name: states[name].view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16) for name in names}

    def tokens(model: Any) -> list[list[int]]:
        lists: list[list[int]] = model.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
        return lists

    files = {"config.json": config.to_json_string().encode()}
    run = PublishedRun(tmp_path / "policy.chain", weights(), ranks=2, files=files, aliases=aliases)
    target, seen = tmp_path / "served", []
    with Follower(run.run) as follower:
        for step in STEPS:
            trained(prompt, labels=prompt).loss.backward()
            optimizer.step()
            run.publish(step, weights())
            follower.apply_to(live.state_dict())
            follow_into(run.run, target, lambda event: None, once=True)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(target / "current", dtype=torch.bfloat16)
            expected = {name: bytes_of_torch(values) for name, values in trained.state_dict().items()}
            seen.append(tokens(trained))
            for model in (live, loaded.eval()):
                assert {name: bytes_of_torch(values) for name, values in model.state_dict().items()} == expected
                assert tokens(model) == seen[-1]
    assert seen[0] != seen[-1]
