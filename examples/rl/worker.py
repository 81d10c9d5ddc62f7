"""Generate samples with the newest policy: `python worker.py FOLDER NAME`. Start as many as you like, at any time."""

import sys
import time
from pathlib import Path

import torch
from policy import GROUP, GROUPS, NEW, PROMPT, digest, log, log_probabilities, new_policy, reward, write

from ckpt import Follower

AHEAD = 2
"""Files of samples that a worker leaves unused before it waits."""

folder, name = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.seed()  # each worker draws samples of its own
policy = new_policy().eval()
number = time.time_ns()  # no two starts of a worker write the same file
with Follower(folder / "policy.chain") as follower, torch.no_grad():
    step = None
    while not (folder / "done").exists():
        newer = follower.wait(timeout=0.0 if step else 0.1)
        if newer is not None:
            step = follower.apply_to(policy.state_dict(), newer)
            log(folder / f"{name}.jsonl", epoch=step.epoch, step=step.step, digest=digest(policy))
        if step is None or len(list((folder / "samples").glob(f"{name}-*.pt"))) >= AHEAD:
            time.sleep(0.01)
            continue
        prompts = torch.randint(0, 64, (GROUPS, PROMPT)).repeat_interleave(GROUP, 0)
        tokens = policy.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=True)
        number += 1
        content = {"epoch": step.epoch, "step": step.step, "tokens": tokens, "rewards": reward(tokens)}
        content["log_probabilities"] = log_probabilities(policy, tokens)
        write(folder / "samples" / f"{name}-{number}.pt", content)
