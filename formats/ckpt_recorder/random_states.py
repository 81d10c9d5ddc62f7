"""The states of the random number generators of torch, NumPy and Python."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt_formats.core.values import Value


def random_states() -> dict[str, Value]:
    """The states of all generators, as arrays: uint8 for torch, uint32 for NumPy and Python."""
    states: dict[str, Value] = {"torch": torch.get_rng_state().numpy()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    version, words, gauss = random.getstate()
    states["python"] = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states["numpy"] = {"kind": kind, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached}
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set all generators to recorded states: `extras["random_states"]["rank-00000"]` of a restored step."""
    torch.set_rng_state(torch.as_tensor(np.asarray(states["torch"], np.uint8)))
    if "cuda" in states:
        torch.cuda.set_rng_state_all([torch.as_tensor(np.asarray(state, np.uint8)) for state in states["cuda"]])
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(np.asarray(python["words"]).tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["kind"], np.asarray(numpy["keys"]), numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
