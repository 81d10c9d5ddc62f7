"""Train a small Llama, then with GRPO and with DPO, and keep the bf16 weights of each step.

    python benchmarks/policy_runs.py [--runs grpo-1e-6 dpo-1e-6 ...] [--steps 40] [--out FOLDER] [--threads 1]

The sync of weights is measured on what training makes. A Llama of 5 M parameters first learns the text of Python's own
library. From there each run trains on: GRPO samples groups of completions and rewards them by a rule; DPO prefers the
text that follows to text from elsewhere. AdamW steps float32 masters, and the model's weights are the masters rounded
to bfloat16. A run is named by its kind and its rate. Every step draws from a generator seeded by its number, so a run
that was stopped goes on as it would have. `tests/support/weight_runs.py` reads the runs. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from trajectory import Size, corpus
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from weight_runs import WeightRun, default_runs

RATES = ("1e-6", "3e-6", "1e-5")
RUNS = tuple(f"{kind}-{rate}" for rate in RATES for kind in ("grpo", "dpo"))
VOCABULARY, CONTEXT = 2048, 256
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
)
PRETRAINING_STEPS, PEAK = 150, 3e-3
WARM_UP = 5
PROMPTS, GROUP, PROMPT, COMPLETION = 4, 4, 24, 24
PAIRS, BETA = 4, 0.1
SAVE_EVERY = 20


class Policy:
    """A model whose weights are float32 masters rounded to bfloat16, and AdamW on the masters."""

    def __init__(self, rate: float, betas: tuple[float, float] = (0.9, 0.999), decay: float = 0.0) -> None:
        torch.manual_seed(1)
        self.model = LlamaForCausalLM(CONFIG)
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=rate, betas=betas, weight_decay=decay, foreach=False)
        self.rate = rate
        self._round()

    def step(self, loss: Tensor, rate: float) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad, p.grad = p.grad, None
        self.optimizer.step()
        self._round()

    def load_masters(self, masters: list[Tensor]) -> None:
        with torch.no_grad():
            for master, values in zip(self.masters, masters, strict=True):
                master.copy_(values)
        self._round()

    def weights(self) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Return all weights as the bits of bfloat16, one tensor after another."""
        flat = torch.cat([p.detach().bfloat16().flatten() for p in self.parameters])
        return flat.view(torch.int16).numpy().view(np.uint16)

    def _round(self) -> None:
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters, strict=True):
                p.copy_(master.bfloat16())


def rows(text: Tensor, count: int, length: int) -> Tensor:
    starts = torch.randint(0, len(text) - length - 1, (count,))
    return torch.stack([text[start : start + length] for start in starts])


def log_chances(model: LlamaForCausalLM, tokens: Tensor, first: int) -> Tensor:
    """Of the tokens from `first` on, given those before each."""
    scores = model(tokens).logits[:, first - 1 : -1].log_softmax(-1)
    return scores.gather(-1, tokens[:, first:, None])[..., 0]


def grpo_loss(policy: Policy, text: Tensor) -> Tensor:
    """Of one batch on policy: the reward is the share of whole words and of distinct tokens in a completion."""
    prompts = rows(text, PROMPTS, PROMPT).repeat_interleave(GROUP, 0)
    with torch.no_grad():
        tokens = policy.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=COMPLETION,
            do_sample=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    completions = tokens[:, PROMPT:]
    distinct = torch.tensor([len(set(row)) / COMPLETION for row in completions.tolist()])
    rewards = ((completions >= 256).float().mean(1) + distinct).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return -(advantages.view(-1, 1) * log_chances(policy.model, tokens, PROMPT)).mean()


def dpo_loss(policy: Policy, reference: LlamaForCausalLM, text: Tensor) -> Tensor:
    """Of one batch: what follows in the text is preferred to what follows elsewhere."""
    chosen = rows(text, PAIRS, 64)
    rejected = torch.cat([chosen[:, :32], chosen.roll(1, 0)[:, 32:]], 1)
    tokens = torch.cat([chosen, rejected])
    with torch.no_grad():
        expected = log_chances(reference, tokens, 32).sum(1)
    gains = log_chances(policy.model, tokens, 32).sum(1) - expected
    return -F.logsigmoid(BETA * (gains[:PAIRS] - gains[PAIRS:])).mean()


def pretrained(out: Path, text: Tensor) -> list[Tensor]:
    """Return the masters after the training as a language model, which is done once."""
    path = out / "pretrained.pt"
    if not path.exists():
        policy = Policy(PEAK, (0.9, 0.95), 0.1)
        for step in range(1, PRETRAINING_STEPS + 1):
            torch.manual_seed(step)
            rate = PEAK * min(1, step / 15) * (0.525 + 0.475 * math.cos(math.pi * step / PRETRAINING_STEPS))
            batch = rows(text, 6, 96)
            loss = policy.model(batch, labels=batch).loss
            policy.step(loss, rate)
            if step % 25 == 0:
                print(f"language model {step}: loss {loss.item():.3f}", flush=True)
        torch.save(policy.masters, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    masters: list[Tensor] = torch.load(path, weights_only=True)
    return masters


def train(out: Path, name: str, steps: int, text: Tensor) -> None:
    """Train a run until it has so many steps. It goes on from the last state of the optimizer that was saved."""
    kind, rate = name.split("-", 1)
    known, unknown = text[: len(text) * 4 // 5], text[len(text) * 4 // 5 :]
    first = pretrained(out, known)
    policy = Policy(float(rate))
    policy.load_masters(first)
    reference = copy.deepcopy(policy.model).eval()
    policy.model.eval()  # no dropout; gradients flow all the same
    losses: dict[str, Callable[[], Tensor]] = {
        "grpo": lambda: grpo_loss(policy, unknown),
        "dpo": lambda: dpo_loss(policy, reference, unknown),
    }
    saved, done = out / name / "optimizer.pt", 0
    if (out / name / "run.json").exists():
        run = WeightRun.open(out / name)
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            done = state["step"]
            policy.optimizer.load_state_dict(state["optimizer"])
            policy.load_masters(state["masters"])
    else:
        shapes = {n: tuple(p.shape) for n, p in policy.model.named_parameters()}
        run = WeightRun.create(out / name, shapes, policy.weights(), rate=rate, kind=kind, config=CONFIG.to_dict())
    began = time.monotonic()
    before = policy.weights()
    for step in range(done + 1, steps + 1):
        torch.manual_seed(1_000_000 + step)
        loss = losses[kind]()
        policy.step(loss, policy.rate * min(1, step / WARM_UP))
        after = policy.weights()
        run.add(step, before, after)
        if step % SAVE_EVERY == 0 or step == steps:
            state = {"step": step, "masters": policy.masters, "optimizer": policy.optimizer.state_dict()}
            torch.save(state, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").replace(saved)
            changed = np.count_nonzero(before != after) / after.size
            pace = (time.monotonic() - began) / (step - done)
            print(f"{name} {step}: loss {loss.item():.4f}, {changed:.2%} changed, {pace:.2f} s a step", flush=True)
        before = after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=default_runs())
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    text = torch.from_numpy(corpus(Size(vocabulary=VOCABULARY)).astype(np.int64))
    for name in given.runs:
        train(given.out, name, given.steps, text)


if __name__ == "__main__":
    main()
