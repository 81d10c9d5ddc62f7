"""A chain of bases of which most did not change: bytes of each base, and CPU seconds of append, verify and restore.

    python benchmarks/frozen_chain.py --bases 5 --frozen 0.9

The state is made in memory: bfloat16 matrices that are frozen, and trained ones with a float32 master, its rounded copy
and two moments. `--frozen` is the share of elements that do not change. Run it in two trees, in turn, to compare them.
"""

import argparse
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpt.chains.append import append
from ckpt.chains.restore import open_step, restore
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.job import load_kernels
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter, Role
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor
from ckpt_formats.universal import Universal

SIDE = 2048
"""Rows and columns of each matrix."""


def states(count: int, matrices: int, frozen: int) -> Iterator[Checkpoint]:
    """The states of a run, one for each step."""
    random, bf16 = np.random.default_rng(1), DTYPES["bfloat16"]

    def matrix() -> Array:
        values: Array = (random.standard_normal((SIDE, SIDE)) * 0.02).astype(np.float32)
        return values

    still = [matrix().astype(bf16) for _ in range(frozen)]
    masters = [matrix() for _ in range(matrices - frozen)]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in masters]
    for step in range(1, count + 1):
        parameters = [_parameter(f"layers.{i}.weight", {"model": values}, "frozen") for i, values in enumerate(still)]
        for i, (w, (m, v)) in enumerate(zip(masters, moments, strict=True)):
            gradient = random.standard_normal(w.shape).astype(np.float32)
            m[:] = np.float32(0.9) * m + np.float32(0.1) * gradient
            v[:] = np.float32(0.95) * v + np.float32(0.05) * gradient**2
            w -= np.float32(1e-3) * m / (np.sqrt(v) + np.float32(1e-8))
            own = {"master": w, "model": w.astype(bf16), "exp_avg": m, "exp_avg_sq": v}
            parameters.append(_parameter(f"layers.{i}.adapter", own, "parameter"))
        trained = tuple(parameter.name for parameter in parameters if parameter.role == "parameter")
        by_name = {parameter.name: parameter for parameter in parameters}
        yield Checkpoint(
            path=Path("/run"),
            origin=Origin("example", None, step),
            parameters=by_name,
            groups=(Group({}, trained),),
            extras={},
            aliases={},
        )


def _parameter(name: str, values: dict[str, Array], role: Role) -> Parameter:
    return Parameter(name, role, {state: Tensor.of(ArrayBlob(array)) for state, array in values.items()}, {})


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", type=int, default=5)
    parser.add_argument("--matrices", type=int, default=40)
    parser.add_argument("--frozen", type=float, default=0.9)
    parser.add_argument("--deltas", action="store_true", help="the first is a base, all others are deltas")
    options = parser.parse_args()
    load_kernels()
    policy = DeltaPolicy(base_every=None if options.deltas else 1)
    with tempfile.TemporaryDirectory() as folder:
        run, resources, total = Path(folder) / "run", Execution(), 0.0
        for state in states(options.bases, options.matrices, round(options.matrices * options.frozen)):
            begin = cpu()
            member = append(run, state, None, policy, resources).member
            total += cpu() - begin
            print(
                f"step {member.step} {member.kind:<5} {member.stored_nbytes / 1e6:8.1f} MB  {cpu() - begin:.2f} CPU s"
            )
        stored = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        print(f"all        {stored / 1e6:8.1f} MB  {total:.2f} CPU s")
        begin = cpu()
        assert not verify_chain(run, resources).findings
        print(f"verify {cpu() - begin:.2f} CPU s", end="; ")
        begin = cpu()
        restore(open_step(run, None, ReadOptions()), Path(folder) / "restored", Universal(), resources)
        print(f"restore of the last {cpu() - begin:.2f} CPU s")


if __name__ == "__main__":
    main()
