"""What the trainer and the workers share: the policy, the task, and the folder in which samples lie."""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT, NEW, GROUP, GROUPS = 2, 10, 8, 8
"""Tokens of a prompt and after it; samples of a prompt, and prompts in a file."""


def new_policy() -> LlamaForCausalLM:
    """A small policy in bfloat16, as a worker serves it."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT + NEW,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).bfloat16()


def reward(tokens: Tensor) -> Tensor:
    """The task is to write small numbers: the share of the new tokens that are below 16, for each sample."""
    return (tokens[:, PROMPT:] < 16).float().mean(1)


def log_probabilities(policy: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Of each new token of each sample."""
    logits = policy(tokens).logits[:, PROMPT - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]


def digest(policy: torch.nn.Module) -> str:
    """Of all bits of the weights in bfloat16, so that everyone can compare."""
    weights = (one.detach().bfloat16().view(torch.int16).numpy() for _, one in sorted(policy.state_dict().items()))
    return hashlib.sha256(b"".join(one.tobytes() for one in weights)).hexdigest()


def write(path: Path, content: object) -> None:
    """Write a file that others see whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(content, temporary)
    temporary.replace(path)


def log(path: Path, **line: object) -> None:
    """Append one line of JSON, at once, so that a killed process leaves whole lines."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
