"""What a checkpoint of a live run must contain, gathered from its memory; no file is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from torch_jobs.run import Run


def gather(run: Run) -> dict[str, Any]:
    """The truth, whole, in every rank; collective.

    `model` maps names to tensors, those of tied ones too; `optimizer` maps names to states; `groups` are the options
    of each group and the `names` of its parameters; `tied` maps the other names of a parameter to its first.
    """
    truth = _gathered_by_torch(run) if run.training.wrapper == "fsdp1" else _gathered(run)
    truth["step"] = run.step
    truth["scheduler"] = _plain(run.scheduler.state_dict()) if run.scheduler else None
    named = run.names()
    first = {id(param): name for name, param in reversed(named.items())}
    truth["tied"] = {name: first[id(param)] for name, param in named.items() if first[id(param)] != name}
    truth["frozen"] = [name for name, param in named.items() if not param.requires_grad]
    truth["buffers"] = list(run.buffers())
    return truth


def differences(truth: dict[str, Any], actual: dict[str, Any]) -> dict[str, str]:
    """Where two truths are not the same bits, by place."""
    out = {}
    flat, other = _flatten(truth), _flatten(actual)
    for place in sorted(flat.keys() | other.keys()):
        if place not in flat or place not in other:
            out[place] = "unexpected" if place in other else "absent"
            continue
        a, b = flat[place], other[place]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            out[place] = f"{tuple(a.shape)} of {a.dtype} became {tuple(b.shape)} of {b.dtype}"
        elif not torch.equal(a, b):
            out[place] = f"off by {(a.double() - b.double()).abs().max().item():g}"
    return out


def differences_anywhere(truth: dict[str, Any], actual: dict[str, Any]) -> dict[str, str]:
    """The same in any rank: what each has gathered from its own replicas; collective."""
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, differences(truth, actual))
    return {
        f"rank {rank}: {place}": difference for rank, mine in enumerate(everyone) for place, difference in mine.items()
    }


def _gathered(run: Run) -> dict[str, Any]:
    named = run.names()
    first = {id(param): name for name, param in reversed(named.items())}
    state = run.optimizer.state
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    return {
        "model": {name: _whole(tensor) for name, tensor in {**named, **run.buffers()}.items()},
        "optimizer": {
            first[id(param)]: {key: _whole(value) for key, value in state[param].items() if value is not None}
            for param in params
        },
        "groups": [
            {**_options(group), "names": [first[id(param)] for param in group["params"]]}
            for group in run.optimizer.param_groups
        ],
    }


def _gathered_by_torch(run: Run) -> dict[str, Any]:
    """FSDP1 keeps flat slices, which only its own functions can put together."""
    options = StateDictOptions(full_state_dict=True)
    model = get_model_state_dict(run.model, options=options)
    optimizer: Any = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    return {
        "model": {name: value.detach().clone() for name, value in model.items()},
        "optimizer": {
            name: {key: _whole(value) for key, value in states.items()} for name, states in optimizer["state"].items()
        },
        "groups": [{**_options(group), "names": list(group["params"])} for group in optimizer["param_groups"]],
    }


def _whole(value: Any) -> Tensor:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without its functions, of which torch saves nothing."""
    return {key: value for key, value in state.items() if key != "lr_lambdas"}


def _flatten(truth: dict[str, Any]) -> dict[str, Tensor]:
    out = {f"model/{name}": value for name, value in truth["model"].items()}
    return out | {
        f"optimizer/{name}/{key}": value for name, states in truth["optimizer"].items() for key, value in states.items()
    }
