"""TRL's weight transfer by a published chain, called in the order of TRL 1.16's trainer.

docs/weight-sync.md says how it was tried with TRL itself, which the environment of the tests lacks.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckpt import Follower
from recording_server import recording_server

pytestmark = pytest.mark.engines


def test_each_synced_step_is_published_before_the_server_is_updated(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which a worker that collects would spend

    from ckpt_serving.trl_transfer import TrlTransfer

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    args, chain = SimpleNamespace(weight_sync_steps=2), tmp_path / "policy.chain"
    seen = []
    with recording_server() as server, Follower(chain) as follower:
        transfer = TrlTransfer(chain, [server.url])
        transfer.on_train_begin(args, SimpleNamespace(global_step=10), None, model=model, optimizer=optimizer)
        transfer.init_weight_transfer()
        for step in range(10, 15):
            if step > 10:
                loss = model(torch.ones(1, 4, dtype=torch.long)).logits.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                transfer.on_step_end(args, SimpleNamespace(global_step=step), None)
            if step % 2 == 0:
                transfer.send_weights(iterator := iter(model.named_parameters()))
                assert next(iterator, None) is None
                update = follower.update()
                weight = follower.tensors()["lm_head.weight"].view("i2")
                assert (weight == model.lm_head.weight.detach().bfloat16().view(torch.int16).numpy()).all()
                seen.append(update.step)
        transfer.on_train_end(args, SimpleNamespace(global_step=14), None)
    assert seen == [10, 12, 14]
    attach, *updates = server.exchange
    assert attach == ("/init_weight_transfer_engine", {"init_info": {"chain": str(chain), "key_file": None}})
    assert [body["update_info"]["step"] for path, body in updates if path == "/update_weights"] == seen
