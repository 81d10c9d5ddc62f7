"""Save checkpoints with Orbax in every way that is read, and what the memory had: `save.py OUT`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from devices import MESHES, mesh_of, names_of, sharded, write_truth
from flax import serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from jax.experimental.array_serialization import serialization as array_serialization
from orbax.checkpoint import msgpack_utils
from orbax.checkpoint.utils import leaf_placeholder

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


def aggregate(folder: Path, tree: Any, least: int, metadata: bool) -> None:
    """Save as Orbax did before 0.5: arrays of fewer axes than `least` are in the file `checkpoint`."""
    pytree(folder, tree, use_ocdbt=False)
    if not metadata:
        for name in ("_METADATA", "_CHECKPOINT_METADATA"):
            (folder / name).unlink()
    plain = ocp.tree.serialize_tree(tree, keep_empty_nodes=True)
    names = {id(leaf): name for name, leaf in names_of(plain).items()}

    def stored(leaf: Any) -> Any:
        if np.ndim(leaf) >= least:
            return leaf_placeholder(names[id(leaf)])
        shutil.rmtree(folder / names[id(leaf)], ignore_errors=True)
        return np.asarray(leaf)

    (folder / "checkpoint").write_bytes(msgpack_utils.msgpack_serialize(jax.tree.map(stored, plain)))


def of_flax(folder: Path, state: TrainState) -> None:
    """Save as `flax.training.checkpoints` did before Orbax: two steps, and one whose arrays are in chunks."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    for step in (900, 1000):
        checkpoints.save_checkpoint(folder, state, step, keep=2)
    serialization.MAX_CHUNK_SIZE = 100
    checkpoints.save_checkpoint(folder.with_name("flax-chunked"), state, 7, prefix="model_")


def of_easydel(folder: Path, tree: Any) -> None:
    """Save as EasyDeL 0.3 does (eformer 0.0.99.12, `tree_serialize_leaves`): by JAX, and an index of all arrays."""
    arrays = {name.replace(".", "/"): leaf for name, leaf in names_of(tree).items()}
    manager = array_serialization.GlobalAsyncCheckpointManager()
    manager.serialize_with_paths(
        list(arrays.values()), [str(folder / path) for path in arrays], on_commit_callback=lambda: None
    )
    manager.wait_until_finished()
    prefixes: dict[str, list[dict[str, Any]]] = {}
    for path, array in arrays.items():
        entry = {"path": path, "shape": list(array.shape), "dtype": str(array.dtype)}
        prefixes.setdefault(path.partition("/")[0], []).append(entry)
    index = {"format": "tensorstore", "version": "0.0.99.12", "prefixes": prefixes}
    (folder / "tensorstore_index.json").write_text(json.dumps(index))


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
    aggregate(out / "aggregate", state, 9, metadata=False)
    aggregate(out / "aggregate-placeholders", state, 2, metadata=False)
    aggregate(out / "aggregate-metadata", state, 2, metadata=True)
    of_flax(out / "flax", state)
    of_easydel(out / "easydel" / "run-3", {"model": tree.params, "tx": tree.opt_state})
    ocp_v1.save_pytree(out / "v1", tree)
    files = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=3000)
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    saver.save(out / "small-files", args=files)
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(out / "run", options=best) as manager:
        for step in (2, 3):
            key = ocp.args.JaxRandomKeySave(jax.random.key(3))
            data = ocp.args.JsonSave({"epoch": step})
            items = ocp.args.Composite(state=ocp.args.StandardSave(tree), data=data, rng=key)
            manager.save(step, args=items, metrics={"loss": 1 / step})
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
