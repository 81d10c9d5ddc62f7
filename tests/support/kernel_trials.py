"""Trials of the kernels of a family: arguments made by chance, given to a kernel at each CPU level and to its twin."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckpt_codecs import CodecError
from ckpt_codecs.native import library
from cpu_levels import LEVELS, at_level
from kernel_headers import read_prototypes

Engine = Any
"""A module `ckpt_codecs.native.*`, or its twins: functions of the same names and arguments."""
Trial = Callable[[Engine], Any]
"""What an engine returns for arguments that exist already."""
Maker = Callable[[np.random.Generator, int], Trial]
"""Makes arguments of n elements."""


class Trials(dict[str, Maker]):
    """Of each kernel of a family, by name, what makes its arguments."""

    def __init__(self, family: ModuleType, *oracles: ModuleType) -> None:
        self.family = family
        self.twins = SimpleNamespace(**{name: value for module in oracles for name, value in vars(module).items()})
        self.prototypes = read_prototypes(family.__name__.rpartition(".")[2])
        self.kernels = [name for name in self.prototypes if not name.endswith("_scratch")]
        """What says how much scratch a kernel takes is tried with it."""

    def of(self, name: str) -> Callable[[Maker], None]:
        """A decorator: the function makes the arguments of the kernel of this name."""

        def register(make: Maker) -> None:
            self[name] = make

        return register

    def agree(self, name: str, seed: int, n: int) -> None:
        """The kernel gives the bits of its twin, at every level."""
        run = self[name](np.random.default_rng(seed), n)
        expected = bits(run(self.twins))
        for level in LEVELS:
            with at_level(level):
                assert bits(run(self.family)) == expected, f"level {level}"

    def refuse_bad_sizes(self, name: str) -> None:
        """The kernel refuses each size that is negative or too large, whatever its other arguments are."""
        kernel, types = getattr(self.family.kernels, name), self.prototypes[name].arguments
        for bad in (-1, library.INT64(1 << 63).value, (1 << 28) + 1):
            with pytest.raises(CodecError, match="sizes do not fit"):
                kernel(*(None if kind == "pointer" else bad if kind == "i64" else 1 for kind in types))
        _, arguments = self.arguments_of(name)
        for i, kind in enumerate(types):
            if kind == "i64":
                with pytest.raises(CodecError, match="sizes do not fit"):
                    kernel(*arguments[:i], -1, *arguments[i + 1 :])

    def arguments_of(self, name: str) -> tuple[Trial, tuple[Any, ...]]:
        """The arguments with which Python calls a kernel first, and the trial that keeps its arrays alive."""
        recorded: list[tuple[Any, ...]] = []
        kernels = self.family.kernels
        kernel = getattr(kernels, name)

        def record(*arguments: Any) -> Any:
            recorded.append(arguments)
            return kernel(*arguments)

        vars(kernels)[name] = record
        try:
            run = self[name](np.random.default_rng(3), 90)
            run(self.family)
            return run, recorded[0]
        finally:
            vars(kernels)[name] = kernel


def bits(result: Any) -> Any:
    """A result in a form that `==` compares to the bit."""
    if isinstance(result, np.ndarray):
        return result.dtype.name, result.shape, result.tobytes()
    return [bits(part) for part in result] if isinstance(result, list | tuple) else result
