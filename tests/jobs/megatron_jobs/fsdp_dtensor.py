"""The state dicts of Megatron-FSDP (`fsdp_dtensor`), by the functions of Megatron core, on one rank without a GPU.

`fsdp_dtensor.py STATES OURS OUT`: STATES is a file with the tensors of a model by Megatron core's names, their moments
and options. OUT is what Megatron saves of them; OURS must have all that Megatron loads, with the same values.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex
from megatron.core.transformer.fsdp_dtensor_checkpoint import flatten_state_dict, handle_swiglu_in_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_jobs import without_cuda


class Module(torch.nn.Module):
    """A module with parameters at these names: the wrappers of Megatron-FSDP, and the model in them."""

    def __init__(self, weights: dict[str, torch.Tensor], index: FSDPDistributedIndex) -> None:
        super().__init__()
        for name, weight in weights.items():
            *path, last = name.split(".")
            place: torch.nn.Module = self
            for step in path:
                if step not in dict(place.named_children()):
                    place.add_module(step, torch.nn.Module())
                place = place.get_submodule(step)
            parameter: Any = torch.nn.Parameter(weight)
            parameter.megatron_fsdp_slice = slice(0, weight.numel())
            parameter.megatron_fsdp_dist_index = index
            place.register_parameter(last, parameter)


def state_dict(states: dict[str, Any], *, empty: bool = False) -> dict[str, Any]:
    """What Megatron-LM gives to torch's `dcp.save`, and with `empty` to `dcp.load`, for a SwiGLU in 16 bits."""
    index = FSDPDistributedIndex(
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), dp_shard_dim="dp", tp_dim="tp"
    )
    module = Module({f"module.module.{name}": weight for name, weight in states["model"].items()}, index)

    def sharded(name: str, tensor: torch.Tensor) -> DTensor:
        parameter = module.get_parameter(f"module.module.{name}")
        content = torch.zeros_like(tensor) if empty else tensor.clone()
        return make_fsdp_dtensor(content, parameter, dist_index=index, update_uneven_dtensor_chunk_meta=True)

    model = {f"module.{name}": sharded(name, weight) for name, weight in states["model"].items()}
    moments = {
        f"module.module.module.{name}": {key: sharded(name, tensor) for key, tensor in own.items()}
        for name, own in states["state"].items()
    }
    meta = {f"module.module.module.{name}": dict(options) for name, options in states["options"].items()}
    optimizer = {"state": moments, "param_to_group_meta": meta}
    model, optimizer = handle_swiglu_in_state_dict(module, model, optimizer)
    return {"model": model, "optimizer": optimizer, "args": argparse.Namespace(**states["args"]), "iteration": 9}


def main() -> None:
    source, ours, out = sys.argv[1:]
    without_cuda.pretend()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    states = torch.load(source, weights_only=False)
    wanted, loaded = state_dict(states), state_dict(states, empty=True)
    dcp.save(wanted, checkpoint_id=out, no_dist=True)
    dcp.load(loaded, checkpoint_id=ours, no_dist=True)
    given = flatten_state_dict(loaded)
    for name, value in flatten_state_dict(wanted).items():
        if isinstance(value, DTensor):
            assert torch.equal(given[name].to_local().view(torch.uint8), value.to_local().view(torch.uint8)), name
        else:
            assert given[name] == value, name


if __name__ == "__main__":
    main()
