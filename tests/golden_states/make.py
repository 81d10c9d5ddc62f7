"""Write checkpoints of optimizers with states of 8 and 4 bits, and the values that the libraries give them.

    python tests/golden_states/make.py

It needs torchao and bitsandbytes, in an environment of its own. Tests read what it wrote. `values.json` has the hash of
each plain state: float32, in C order.
"""

import json
import sys
import zlib
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import bitsandbytes
import bitsandbytes.functional
import torch
import torchao.optim

FOLDER = Path(__file__).parent
OUTPUTS = 66
"""Of the second layer: 64 * 66 values have a last block of bitsandbytes that is shorter than 256."""


def trained(make: Any) -> dict[str, Any]:
    """A small model after three steps. Its weights are ones, which take few bytes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=True), torch.nn.Linear(64, OUTPUTS, bias=False))
    optimizer = make(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    return {"model": weights, "optimizer": optimizer.state_dict()}


def plain_states(state: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The values of a parameter's quantised states, by the library."""
    if "__bnb_optimizer_quant_state__" not in state:
        return {
            key: value.dequantize() for key, value in state.items() if type(value).__name__.startswith("OptimState")
        }
    own = state["__bnb_optimizer_quant_state__"]
    decode = bitsandbytes.functional.dequantize_blockwise
    return {
        name: decode(own[f"state{i}"], absmax=own[f"absmax{i}"], code=own[f"qmap{i}"], blocksize=256)
        for i, name in enumerate(names, 1)
        if f"qmap{i}" in own
    }


def main() -> int:
    kinds: dict[str, tuple[Any, tuple[str, ...]]] = {
        "torchao-8-bit": (lambda p: torchao.optim.AdamW8bit(p), ()),
        "torchao-4-bit": (lambda p: torchao.optim.AdamW4bit(p), ()),
        "torchao-fp8": (lambda p: torchao.optim.AdamWFp8(p), ()),
        "bitsandbytes-adam": (lambda p: bitsandbytes.optim.Adam8bit(p, min_8bit_size=1024), ("exp_avg", "exp_avg_sq")),
        "bitsandbytes-lion": (lambda p: bitsandbytes.optim.Lion8bit(p, min_8bit_size=1024), ("state1",)),
    }
    values: dict[str, dict[str, str]] = {}
    for kind, (make, names) in kinds.items():
        checkpoint, buffer = trained(make), BytesIO()
        torch.save(checkpoint, buffer)
        (FOLDER / f"{kind}.z").write_bytes(zlib.compress(buffer.getvalue(), 9))
        for title, state in zip(checkpoint["model"], checkpoint["optimizer"]["state"].values(), strict=True):
            for name, plain in plain_states(state, names).items():
                digest = blake2b(plain.float().numpy().tobytes(), digest_size=16).hexdigest()
                values.setdefault(kind, {})[f"{title}/{name}"] = digest
    (FOLDER / "values.json").write_text(json.dumps(values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
