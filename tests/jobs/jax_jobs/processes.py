"""Save with two processes of JAX, each with disks of its own: `processes.py OUT PORT RANK`.

whole            all processes write to one disk
node-0, node-1   multi-tier checkpointing: each process writes its part to its own disk
gda              `flax.training.checkpoints` with arrays that several processes hold
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import sys
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.training import checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as replicator


def tree(mesh: Mesh) -> dict[str, Any]:
    """A state whose kernels are split over all devices, and whose biases each device has."""

    def put(values: Any, *axes: str) -> jax.Array:
        values = np.asarray(values)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    kernel, bias = np.arange(384.0, dtype=np.float32).reshape(16, 24), np.arange(24.0, dtype=np.float32)
    states = {name: {"kernel": put(kernel * i, "d"), "bias": put(bias * i)} for i, name in ((2, "mu"), (3, "nu"))}
    params = {"kernel": put(kernel, "d"), "bias": put(bias)}
    return {"params": params, "opt_state": {"0": {**states, "count": put(np.int32(3))}}, "step": put(np.int32(3))}


def main(out: Path, port: int, rank: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    state = tree(mesh)
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    saver.save(out / "whole", args=ocp.args.PyTreeSave(state))
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
    disk = out / f"node-{rank}"
    disk.mkdir()
    options = replicator.ReplicatorCheckpointManagerOptions()
    manager = replicator.ReplicatorCheckpointManager(disk, options=options, global_mesh=mesh)
    for step in (2, 3):
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    manager.wait_until_finished()
    manager.close()
    flax.config.update("flax_use_orbax_checkpointing", False)
    arrays = GlobalAsyncCheckpointManager()
    checkpoints.save_checkpoint_multiprocess(out / "gda", state, 3, gda_manager=arrays)
    arrays.wait_until_finished()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
