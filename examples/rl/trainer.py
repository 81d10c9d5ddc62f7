"""Train a policy by GRPO from the samples of the workers, and publish it: `python trainer.py FOLDER STEPS`.

Killed and started again, it goes on from its last save. The steps since then are trained anew, in a new epoch.
"""

import sys
import time
from pathlib import Path

import torch
from policy import GROUP, GROUPS, digest, log, log_probabilities, new_policy

from ckpt_training import Publisher, Saver, load

OLDEST = 4
"""Samples of a policy that is older by more steps are dropped."""

folder, last = Path(sys.argv[1]), int(sys.argv[2])
saves, samples = folder / "trainer.chain", folder / "samples"
samples.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(1)
torch.manual_seed(1)
policy = new_policy().float()  # the optimizer steps float32 weights; the workers get them in bfloat16
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
first = load(saves, policy, optimizer).step if (saves / "chain.json").exists() else 0


def next_samples(step: int, epoch: int) -> dict[str, torch.Tensor]:
    """Wait for samples of this epoch that are not too old; each file is used once."""
    while True:
        for path in sorted(samples.glob("*.pt"), key=lambda one: one.stat().st_mtime):
            batch = torch.load(path, weights_only=True)
            path.unlink()
            if batch["epoch"] == epoch and batch["step"] >= step - OLDEST:
                return batch
        time.sleep(0.01)


with (
    Saver(policy, optimizer, saves) as saver,
    Publisher(policy, optimizer, folder / "policy.chain", step=first) as publisher,
):
    publisher.wait(first)
    epoch = publisher.published.epoch
    log(folder / "trainer.jsonl", epoch=epoch, step=first, digest=digest(policy))
    for step in range(first + 1, last + 1):
        batch = next_samples(step, epoch)
        rewards = batch["rewards"].view(GROUPS, GROUP)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1)
        ratio = (log_probabilities(policy, batch["tokens"]) - batch["log_probabilities"]).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage).mean()
        loss.backward()
        optimizer.step()  # publishes, without waiting for it
        optimizer.zero_grad()
        if step % 5 == 0:
            saver.save(step)
        mean = rewards.mean().item()
        log(folder / "trainer.jsonl", epoch=epoch, step=step, digest=digest(policy), reward=mean)
        print(f"step {step}: reward {mean:.3f}, samples of step {batch['step']}", flush=True)
(folder / "done").touch()
