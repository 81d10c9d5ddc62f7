"""The states of the random number generators of torch, NumPy and Python."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.arguments import checked
from ckpt_formats.universal.gradients.random_states import GeneratorState, as_values


class RandomStates:
    """Follows all generators, to record those that changed."""

    def __init__(self) -> None:
        self._step: int | None = None
        """The step to which the last states belong."""
        self._states: dict[str, GeneratorState] = {}
        self._before: tuple[int | None, dict[str, GeneratorState]] = (None, {})
        """The last states of the step before, and that step."""
        self._python: tuple[Any, GeneratorState] | None = None
        """Python's state as it gives it, and the same as it is recorded: it is slow to convert."""

    def changed(self, step: int) -> dict[str, GeneratorState]:
        """The generators whose states differ from the last ones. The states are those at `step` from now on."""
        if step != self._step:
            self._before = self._step, self._states
            self._step = step
        now = self._now()
        changed = {name: state for name, state in now.items() if not _is_equal(state, self._states.get(name))}
        self._states = self._states | changed
        return changed

    def return_to(self, step: int) -> dict[str, GeneratorState]:
        """The states of all generators at `step`: the current ones, unless these were seen at that step or the next.

        `changed` compares with them from now on.
        """
        if self._before[0] == step:
            self._step, self._states = step, self._before[1]
        elif self._step != step:
            self.changed(step)
        return self._states

    def values(self) -> dict[str, Any]:
        """Return the current states of all generators, as `restore_random_states` takes them."""
        return as_values(self._now(), Path())

    def _now(self) -> dict[str, GeneratorState]:
        """The states of all generators."""
        states: dict[str, GeneratorState] = {"torch": GeneratorState({}, torch.get_rng_state().numpy())}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for number, state in enumerate(torch.cuda.get_rng_state_all()):
                states[f"cuda:{number}"] = GeneratorState({}, state.numpy())
        python = random.getstate()
        if self._python is None or python != self._python[0]:
            version, words, gauss = python
            fields = {"version": version, "words": None, "gauss": gauss}
            self._python = python, GeneratorState(fields, _bytes(words))
        states["python"] = self._python[1]
        numpy: Any = np.random.get_state()
        if isinstance(numpy, tuple):
            kind, keys, position, has_gauss, cached = numpy
            fields = {"kind": kind, "keys": None, "position": position, "has_gauss": has_gauss, "cached": cached}
            states["numpy"] = GeneratorState(fields, _bytes(keys))
        else:  # a generator of another kind was set
            states["numpy"] = GeneratorState(encode(dict(numpy)), np.zeros(0, np.uint8))
        return states


def _bytes(words: Any) -> Array:
    return np.array(words, "<u4").view(np.uint8)


def _is_equal(state: GeneratorState, other: GeneratorState | None) -> bool:
    return other is not None and state.fields == other.fields and np.array_equal(state.words, other.words)


@checked
def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set all generators to recorded states: `extras["random_states"]["rank-00000"]` of a restored step."""
    torch.set_rng_state(_state(states["torch"]))
    if "cuda" in states:
        torch.cuda.set_rng_state_all([_state(state) for state in states["cuda"]])
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(np.asarray(python["words"]).tolist()), python["gauss"]))
    if "keys" in numpy:
        numpy = numpy["kind"], np.asarray(numpy["keys"]), numpy["position"], numpy["has_gauss"], numpy["cached"]
    np.random.set_state(numpy)


def _state(state: Any) -> torch.Tensor:
    """The bytes of a state on the CPU, whatever the program's default device is."""
    return torch.from_numpy(np.array(state, np.uint8))
