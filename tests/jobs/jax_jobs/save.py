"""Save checkpoints with Orbax in every way that is read, and what the memory had: `save.py OUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from devices import MESHES, mesh_of, sharded, write_truth
from flax.training.train_state import TrainState

SHAPES = [(), (1,), (7,), (5, 3), (16, 24), (8, 1, 1, 6)]
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(1)
    layers = {"kernel": _normal(random, 16, 24), "bias": jnp.zeros(24)}
    decoder = {"layers": layers, "norm": {"scale": jnp.ones(16, jnp.bfloat16)}}
    return {"decoder": decoder, "embedding": _normal(random, 128, 16)}


def _normal(random: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape, np.float32))


def trained(optimizer: optax.GradientTransformation, steps: int) -> TrainState:
    result = TrainState.create(apply_fn=None, params=parameters(), tx=optimizer)
    step = jax.jit(lambda state: state.apply_gradients(grads=jax.tree.map(jnp.sin, state.params)))
    for _ in range(steps):
        result = step(result)
    return result


def pytree(folder: Path, tree: Any, **options: Any) -> None:
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
    saver.save(folder, args=ocp.args.PyTreeSave(tree))
    saver.close()


def main(out: Path) -> None:
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)))
    state = trained(adam, 3)
    write_truth(state, out / "state.json")
    for mesh in MESHES:
        pytree(out / f"mesh-{mesh}", sharded(state, mesh_of(mesh)))
    tree = sharded(state, mesh_of("4x2"))
    pytree(out / "zarr3", tree, use_zarr3=True)
    pytree(out / "plain", tree, use_ocdbt=False)
    pytree(out / "plain-zarr3", tree, use_ocdbt=False, use_zarr3=True)
    with ocp.CheckpointManager(out / "run") as manager:
        for step in (2, 3):
            key = ocp.args.JaxRandomKeySave(jax.random.key(3))
            data = ocp.args.JsonSave({"epoch": step})
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(tree), data=data, rng=key))
        manager.wait_until_finished()
    kinds = {
        f"{dtype}_{i}": jax.device_put(np.asarray(np.random.default_rng(i).integers(0, 100, shape)).astype(dtype))
        for dtype in DTYPES
        for i, shape in enumerate(SHAPES)
    }
    write_truth(kinds, out / "kinds.json")
    pytree(out / "kinds", {"params": kinds})
    pytree(out / "kinds-zarr3", {"params": kinds}, use_zarr3=True)
    trace = trained(optax.sgd(1e-3, momentum=0.9), 1)
    mixed = {"params": trace.params, "opt_state": trace.opt_state, "key": jax.random.key(5), "n": 3, "x": 2.5}
    pytree(out / "mixed", {**mixed, "text": "words", "list": [jnp.ones(3), None, {}, ()]})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
