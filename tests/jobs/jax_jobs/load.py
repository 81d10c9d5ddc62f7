"""Load checkpoints of Orbax with Orbax itself: `load.py JOBS`, a JSON list of {path, mesh, out}.

Arrays are restored to this mesh; without one, to the memory of the host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from devices import mesh_of, sharding_of, write_truth


def load(path: Path, mesh: str | None) -> Any:
    restorer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    if mesh is None:
        return restorer.restore(path)
    metadata = restorer.metadata(path).item_metadata.tree
    devices = mesh_of(mesh)

    def argument(leaf: Any) -> Any:
        if not getattr(leaf, "shape", None):
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=sharding_of(leaf.shape, devices), global_shape=leaf.shape)

    arguments = jax.tree.map(argument, metadata)
    return restorer.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))


def main(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        tree = load(Path(job["path"]), job["mesh"])
        write_truth(tree, Path(job["out"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
