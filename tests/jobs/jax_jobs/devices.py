"""JAX on eight devices of the processor. Import this before anything that imports jax."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESHES: dict[str, Sequence[int]] = {"1": (1, 1), "2": (2, 1), "8": (8, 1), "4x2": (4, 2), "2x4": (2, 4)}


def mesh_of(name: str) -> Mesh:
    """A mesh with the axes `data` and `model`."""
    shape = MESHES[name]
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "model"))


def sharded(tree: Any, mesh: Mesh) -> Any:
    """The tree with each array split over the mesh, along the first axes that it divides."""

    def put(value: Any) -> Any:
        if not isinstance(value, jax.Array | np.ndarray):
            return value
        # From NumPy: to move an array between devices is compiled anew for each shape.
        return jax.device_put(np.asarray(value), sharding_of(value.shape, mesh))

    return jax.tree.map(put, tree)


def sharding_of(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Both axes of the mesh over the first two axes of an array, where they divide them."""
    if len(shape) == 1 and shape[0] % mesh.size == 0:
        return NamedSharding(mesh, PartitionSpec(("data", "model")))
    axes = [axis if n % mesh.shape[axis] == 0 and n else None for axis, n in zip(mesh.axis_names, shape, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*axes))


def names_of(tree: Any) -> dict[str, Any]:
    """Each leaf by the keys of its path, joined by dots."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(_key(key)) for key in path): leaf for path, leaf in leaves}


def _key(key: Any) -> Any:
    return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


def write_truth(tree: Any, out: Path) -> None:
    """Write what the memory has: the bytes of each array, with its type and shape."""
    listed = {}
    with out.with_suffix(".bin").open("wb") as file:
        for name, leaf in names_of(tree).items():
            if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            array = np.frombuffer(leaf.encode(), np.uint8) if isinstance(leaf, str) else np.asarray(leaf)
            listed[name] = [array.dtype.name, list(array.shape), file.tell()]
            file.write(array.tobytes())
    out.write_text(json.dumps(listed))
