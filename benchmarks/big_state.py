"""One training state under many names, as a file of torch.save: `python benchmarks/big_state.py STATE BYTES TARGET`."""

import sys
from pathlib import Path
from typing import Any

import torch


def repeated(value: Any) -> Any:
    """Tensors of their own: what shares memory would be saved once."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: repeated(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def main(state: Path, nbytes: int, target: Path) -> None:
    tree = torch.load(state, weights_only=True)
    names = [f"copy{i}" for i in range(max(1, round(nbytes / state.stat().st_size)))]
    held = tree["optimizer"]["state"]
    groups = [
        {**group, "params": [f"{name}.{one}" for name in names for one in group["params"]]}
        for group in tree["optimizer"]["param_groups"]
    ]
    optimizer = {
        "state": {f"{name}.{one}": repeated(states) for name in names for one, states in held.items()},
        "param_groups": groups,
    }
    model = {f"{name}.{one}": repeated(weight) for name in names for one, weight in tree["model"].items()}
    torch.save({"model": model, "optimizer": optimizer, "step": tree["step"]}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
