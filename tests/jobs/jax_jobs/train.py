"""Train the decoder of `llama.py` with optax: `train.py JOBS`.

JOBS is a JSON list of {start, steps, out, saved_after, mesh, log}.

`start` is a checkpoint that Orbax restores strictly into a `TrainState`; `out` is saved by Orbax, after so many steps.
Both may be null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama
import optax
import orbax.checkpoint as ocp
from devices import mesh_of, sharded, write_truth
from flax.training.train_state import TrainState


def main(jobs: list[dict[str, Any]]) -> None:
    optimizer = optax.adamw(llama.RATE, eps=llama.EPSILON, weight_decay=llama.DECAY)

    @jax.jit
    def advance(state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(llama.loss)(state.params, tokens)
        return state.apply_gradients(grads=gradients), value

    for job in jobs:
        first = TrainState.create(apply_fn=llama.loss, params=llama.parameters(), tx=optimizer)
        state = sharded(first.replace(step=jnp.int32(0)), mesh_of(job["mesh"]))
        with ocp.StandardCheckpointer() as checkpointer:
            if job["start"]:
                template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
                state = checkpointer.restore(Path(job["start"]).absolute(), template)
                write_truth(state, Path(job["log"]).with_suffix(".start.json"))
            losses = []
            for step in range(1, job["steps"] + 1):
                state, value = advance(state, llama.batch(int(state.step)))
                losses.append(float(value))
                if job["out"] and step == job["saved_after"]:
                    checkpointer.save(Path(job["out"]).absolute(), state)
                    checkpointer.wait_until_finished()
        write_truth(state, Path(job["log"]).with_suffix(".end.json"))
        Path(job["log"]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
