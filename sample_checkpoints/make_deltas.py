"""Write the golden chain of deltas: `python sample_checkpoints/make_deltas.py`. No engine is needed but torch.

`universal-1-delta/` is a chain: a base, and a delta by each delta codec, each after one step of torch's AdamW. It has
float32 masters with bfloat16 copies and moments, a tensor of several chunks, a frozen parameter, a buffer, and a
parameter that the first members do not have. `universal-1-delta.expected.json` has the expected values of each member:
the XXH3-128 of every state. Those of the exact members are computed here from the tensors of torch, those of the
approximate members are what this program decodes. A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codecs"))

from ckpt_cli.main import cli
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file

HERE = Path(__file__).resolve().parent
NAME = "universal-1-delta"
TIME = "2026-01-01T00:00:00Z"
FIRST, LATE = 10, 12
"""The step of the base, and the first step that has the parameter `late`."""
CODECS = (None, "replay", "difference", "subspace", "lc:bits=3", "excp", "replay")
"""The codec of each member."""
EXACT = ("replay", "difference")
SHAPES = {"table": (613, 450), "block.weight": (48, 64), "block.bias": (48,), "late": (20, 30)}
ACTIVE_ROWS = 5
"""Rows of `table` that are not zero and have gradients."""


def checkpoints() -> Iterator[tuple[int, dict[str, Any]]]:
    """The step and the content of a file of torch.save, for each member."""
    random = torch.Generator().manual_seed(1)
    masters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, master in masters.items():
        rows = ACTIVE_ROWS if name == "table" else len(master)
        master[:rows] = 0.05 * torch.randn(master[:rows].shape, generator=random)
    groups = [{"params": [masters["table"], masters["block.weight"]]}, {"params": [masters["block.bias"]]}]
    optimizer = torch.optim.AdamW(
        [*groups, {"params": [masters["late"]]}], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    for step in range(1, FIRST + len(CODECS)):
        for name, master in masters.items():
            rows = ACTIVE_ROWS if name == "table" else len(master)
            master.grad = torch.zeros_like(master)
            master.grad[:rows] = 0.01 * torch.randn(master[:rows].shape, generator=random)
        optimizer.step()
        if step >= FIRST:
            yield step, checkpoint(step, masters, optimizer)


def checkpoint(step: int, masters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The content of a file as `ckpt convert --to torch` writes it: docs/format.md."""
    names = [name for name in masters if name != "late" or step >= LATE]
    group_names = (("table", "block.weight"), ("block.bias",), ("late",))
    states, groups = {}, []
    for name in names:
        moments = {key: value.clone() for key, value in optimizer.state[masters[name]].items() if key != "step"}
        states[name] = {"fp32": masters[name].clone(), **moments, "step": step}
    for group, members in zip(optimizer.param_groups, group_names, strict=True):
        params = [name for name in members if name in names]
        groups += [{**group, "params": params}] if params else []
    model = {name: masters[name].bfloat16() for name in names}
    model |= {"frozen": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(step)}
    roles = {**dict.fromkeys(names, "parameter"), "frozen": "frozen", "count": "buffer"}
    origin = {"engine": "golden", "version": "1", "step": step, "layout": {}}
    extras = {"ckpt": {"roles": roles, "aliases": {}, "origin": origin, "tensors": {}}, "epoch": step // 4}
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "extras": extras}


def hashes(content: dict[str, Any]) -> dict[str, str]:
    """By `<parameter>/<state>`, the hash of the values of every tensor in such a content."""
    tensors = {f"{name}/param": tensor for name, tensor in content["model"].items()}
    for name, states in content["optimizer"]["state"].items():
        tensors |= {f"{name}/{state}": value for state, value in states.items() if isinstance(value, torch.Tensor)}
    return {
        key: xxhash.xxh3_128_hexdigest(bytes(value.contiguous().untyped_storage())) for key, value in tensors.items()
    }


def decoded_hashes(path: str) -> dict[str, str]:
    """The same of a checkpoint, as this program decodes it."""
    return {
        f"{parameter.name}/{to_stored(state)}": xxhash.xxh3_128_hexdigest(read(tensor).tobytes())
        for parameter, state, tensor in open_checkpoint(Path(path)).tensors()
    }


def main() -> None:
    chain = HERE / NAME
    shutil.rmtree(chain, ignore_errors=True)
    expected: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source.pt"
        for codec, (step, content) in zip(CODECS, checkpoints(), strict=True):
            torch.save(content, source)
            arguments = ["append", str(chain), str(source), "--workers", "1"]
            cli.main([*arguments, *(["--codec", codec] if codec else [])], prog_name="ckpt", standalone_mode=False)
            expected[str(step)] = decoded_hashes(f"{chain}@{step}")
            if codec is None or codec in EXACT:
                assert expected[str(step)] == hashes(content), step
    (chain / "chain.lock").unlink(missing_ok=True)
    content_of = chain_file.load(chain / chain_file.NAME)
    members = tuple(replace(member, time=TIME) for member in content_of.members)
    (chain / chain_file.NAME).write_bytes(chain_file.dump(replace(content_of, members=members)))
    chain.with_suffix(".expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    nbytes = sum(path.stat().st_size for path in chain.rglob("*") if path.is_file())
    print(f"{chain.name}: {len(expected)} members, {nbytes:,} bytes")


if __name__ == "__main__":
    main()
