"""The state dicts of Megatron-FSDP (`--ckpt-format fsdp_dtensor`), as those of Megatron core's models, and back.

    {"model": {"module.<name>": tensor},
     "optimizer": {"state": {"module.module.module.<name>": {"exp_avg": tensor, ...}},
                   "param_to_group_meta": {"module.module.module.<name>": {"lr": ..., ...}}},
     "args": ..., "iteration": ...}

The first layer of a SwiGLU is two tensors, the gate `<name>_w` and `<name>_v`, in the model and in the states, not in
`param_to_group_meta`. Experts have the numbers that they have in the whole model.
Source: Megatron core, `transformer/fsdp_dtensor_checkpoint.py`, `optimizer/distrib_optimizer.py`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, Value
from ckpt_formats.core.views import concatenated, rows_of
from ckpt_formats.names.arguments import ARGUMENTS

_MODEL, _OPTIMIZER = "model", "optimizer"
_STATE, _META, _GROUPS = "state", "param_to_group_meta", "param_groups"
_IN_MODEL, _IN_OPTIMIZER = "module.", "module.module.module."
_WRAPPERS = re.compile(r"(?:module\.)+")
_FC1 = re.compile(
    r".*\.mlp\.(?:(?:shared_experts\.|experts\.local_experts\.\d+\.)?linear_fc1\.(?:weight|bias)"
    r"|experts\.linear_fc1\.(?:weight|bias)\d+)"
)
"""Matches names of the first layer of an MLP, which is split in halves if it is a SwiGLU."""
_HALVES = ("_w", "_v")


@lru_cache(1 << 10)  # the first steps of all paths are few
def core_name(key: str) -> str:
    """The tensor of Megatron core to which a key belongs.

    >>> core_name("module.decoder.layers.0.mlp.linear_fc1.weight_v")
    'decoder.layers.0.mlp.linear_fc1.weight'
    """
    name = _without_wrappers(key)
    return name[:-2] if name.endswith(_HALVES) and _FC1.fullmatch(name[:-2]) else name


def is_of_megatron_fsdp(tree: Mapping[str, Value]) -> bool:
    """Whether a tree of state dicts has the keys of Megatron-FSDP, and no other."""
    model, optimizer = tree.get(_MODEL), tree.get(_OPTIMIZER)
    if not isinstance(model, dict) or not model or not all(isinstance(key, str) for key in model):
        return False
    if isinstance(optimizer, dict):
        return isinstance(optimizer.get(_META), dict) and optimizer.keys() <= {_STATE, _META}
    # Without an optimizer, the halves tell it.
    is_wrapped = all(key.startswith(_IN_MODEL) for key in model)
    return optimizer is None and is_wrapped and any(core_name(key) != _without_wrappers(key) for key in model)


def to_core(tree: Mapping[str, Value], where: Path) -> dict[str, Value]:
    """The tree under Megatron core's names, with the optimizer as PyTorch's: gates and the other halves are joined.

    Raises `IncompleteError` for a half without the other, `CorruptError` for halves that do not fit and for groups of
    unknown form.
    """
    model, optimizer = tree[_MODEL], tree.get(_OPTIMIZER)
    assert isinstance(model, dict)
    result: dict[str, Value] = {**tree, _MODEL: _joined(model, where)}
    if isinstance(optimizer, dict):
        states, meta = optimizer.get(_STATE) or {}, optimizer[_META]
        assert isinstance(meta, dict)
        if not isinstance(states, dict):
            raise CorruptError("the states of the optimizer are not by name", where=where)
        result[_OPTIMIZER] = _core_optimizer(_joined(states, where), meta, where)
    return result


def to_megatron_fsdp(tree: Mapping[str, Value], source: Checkpoint) -> dict[str, Value]:
    """The tree of a source with Megatron core's names under the keys of Megatron-FSDP.

    Raises `IncompleteError` for a source without the run's arguments, `UnsupportedError` for a SwiGLU with an odd
    number of rows.
    """
    args = source.extras.get(ARGUMENTS)
    if not isinstance(args, Record):
        raise IncompleteError(
            "the keys of Megatron-FSDP depend on the run's arguments (`swiglu`), and there are none",
            hint="Name the model's config.json with --config.",
        )
    gated = bool(args.get("swiglu")) or args.get("glu_activation") == "swiglu"
    model, optimizer = tree[_MODEL], tree.get(_OPTIMIZER)
    assert isinstance(model, dict)
    result: dict[str, Value] = {**tree, _MODEL: dict(_split(model, _IN_MODEL, gated))}
    if isinstance(optimizer, dict):
        states, groups = optimizer[_STATE], optimizer[_GROUPS]
        assert isinstance(states, dict)
        assert isinstance(groups, list)
        meta = {
            f"{_IN_OPTIMIZER}{name}": {**_step(source.parameters.get(name)), **options}
            for group in groups
            for options in [{key: value for key, value in group.items() if key != "params"}]
            for name in group["params"]
        }
        result[_OPTIMIZER] = {_STATE: dict(_split(states, _IN_OPTIMIZER, gated)), _META: meta}
    return result


def _joined(entries: Mapping[Any, Value], where: Path) -> dict[str, Value]:
    """Tensors, or the states of parameters, by the names of Megatron core."""
    result: dict[str, Value] = {}
    for key, value in entries.items():
        name, prefix = core_name(str(key)), _prefix(str(key))
        if prefix + name != str(key):
            gate, other = (entries.get(f"{prefix}{name}{half}") for half in _HALVES)
            if gate is None or other is None:
                raise _half_missing(name, where)
            if str(key).endswith(_HALVES[1]):
                continue  # it was joined to its gate
            value = _join(name, gate, other, where)
        if name in result:
            raise CorruptError(f"two values have the name `{printable(name)}`", where=where)
        result[name] = value
    return result


def _without_wrappers(key: str) -> str:
    return key.removeprefix(_prefix(key))


def _prefix(key: str) -> str:
    match = _WRAPPERS.match(key)
    return match[0] if match else ""


def _half_missing(name: str, where: Path) -> IncompleteError:
    return IncompleteError(
        f"only one half of `{printable(name)}` is there", where=where, hint="Copy all files of the checkpoint."
    )


def _join(name: str, gate: Value, other: Value, where: Path) -> Value:
    """A tensor from its halves; for states of a parameter, each of them."""
    if isinstance(gate, dict) and isinstance(other, dict) and gate.keys() == other.keys():
        return {key: _join(name, value, other[key], where) for key, value in gate.items()}
    if isinstance(gate, Tensor) and isinstance(other, Tensor) and gate.shape == other.shape:
        try:
            return concatenated([gate, other]) if gate.shape else with_replicas([gate, other])
        except CkptError as error:
            raise CorruptError(f"the halves of `{printable(name)}` do not fit: {error.what}", where=where) from error
    if not isinstance(gate, (Tensor, dict)) and type(gate) is type(other) and gate == other:
        return gate
    raise CorruptError(f"the halves of `{printable(name)}` differ in more than their values", where=where)


def _core_optimizer(states: dict[str, Value], meta: Mapping[Any, Value], where: Path) -> dict[str, Value]:
    """States and groups as PyTorch's optimizers save them. Parameters with equal options become one group."""
    groups: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for key, options in meta.items():
        name = core_name(str(key))
        if name in names:
            raise CorruptError(f"`{printable(name)}` has options twice", where=where)
        names.add(name)
        if not isinstance(options, dict):
            raise CorruptError(f"the options of `{printable(name)}` are not a dict", where=where)
        own = {option: value for option, value in options.items() if option != "step"}
        state = states.get(name)
        if "step" in options and isinstance(state, dict):  # fused optimizers count for all parameters of a group
            states[name] = {"step": options["step"], **state}
        try:
            text = repr(encode(dict(sorted(own.items()))))
        except (TypeError, ValueError) as error:
            raise CorruptError(f"the options of `{printable(name)}` have an unknown form", where=where) from error
        groups.setdefault(text, {**own, "params": []})["params"].append(name)
    return {_STATE: dict(states), _GROUPS: list(groups.values())}


def _split(entries: Mapping[Any, Value], prefix: str, gated: bool) -> Iterator[tuple[str, Value]]:
    for name, value in entries.items():
        if gated and _FC1.fullmatch(name):
            for i, half in enumerate(_HALVES):
                yield f"{prefix}{name}{half}", _half(name, value, i)
        else:
            yield f"{prefix}{name}", value


def _half(name: str, value: Value, number: int) -> Value:
    if isinstance(value, dict):
        return {key: _half(name, one, number) for key, one in value.items()}
    if not isinstance(value, Tensor) or not value.shape:
        return value
    rows = value.shape[0]
    if rows % 2:
        raise UnsupportedError(f"`{printable(name)}` has {rows} rows, which have no two halves")
    return rows_of(value, [(number * rows // 2, (number + 1) * rows // 2)])


def _step(parameter: Parameter | None) -> dict[str, Value]:
    """The count of steps, where fused optimizers have it: among the options of a group."""
    step = None if parameter is None else parameter.values.get("step")
    return {"step": int(step)} if isinstance(step, (int, float)) else {}
