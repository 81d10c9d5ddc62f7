"""One training state under many names, as a file of torch.save: `python benchmarks/big_state.py STATE BYTES TARGET`.

With `joined` at the end, all matrices of equal width are one, below each other, so that tensors have the sizes of a
model of billions: what a program needs for each tensor weighs less then. Vectors are left out.
"""

import sys
from pathlib import Path
from typing import Any

import torch


def repeated(value: Any) -> Any:
    """Tensors of their own: what shares memory would be saved once."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: repeated(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def joined(tree: dict[str, Any]) -> dict[str, Any]:
    """The training state with all matrices of equal width as one."""
    names_by_width: dict[int, list[str]] = {}
    for name, weight in tree["model"].items():
        if weight.ndim == 2 and name in tree["optimizer"]["state"]:
            names_by_width.setdefault(weight.shape[1], []).append(name)
    state_by_name = tree["optimizer"]["state"]
    model, states = {}, {}
    for width, names in names_by_width.items():
        model[f"wide{width}"] = torch.cat([tree["model"][name] for name in names])
        states[f"wide{width}"] = {
            key: torch.cat([state_by_name[name][key] for name in names]) if value.ndim == 2 else value
            for key, value in state_by_name[names[0]].items()
        }
    group = {**tree["optimizer"]["param_groups"][0], "params": list(model)}
    return {**tree, "model": model, "optimizer": {"state": states, "param_groups": [group]}}


def main(state: Path, nbytes: int, target: Path, is_joined: bool) -> None:
    tree = torch.load(state, weights_only=True)
    names = [f"copy{i}" for i in range(max(1, round(nbytes / state.stat().st_size)))]
    state_by_name = tree["optimizer"]["state"]
    groups = [
        {**group, "params": [f"{name}.{one}" for name in names for one in group["params"]]}
        for group in tree["optimizer"]["param_groups"]
    ]
    optimizer = {
        "state": {f"{name}.{one}": repeated(states) for name in names for one, states in state_by_name.items()},
        "param_groups": groups,
    }
    model = {f"{name}.{one}": repeated(weight) for name in names for one, weight in tree["model"].items()}
    big = {"model": model, "optimizer": optimizer, "step": tree["step"]}
    torch.save(joined(big) if is_joined else big, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), is_joined=sys.argv[4:] == ["joined"])
