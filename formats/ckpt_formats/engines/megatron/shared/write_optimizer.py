"""Write the optimizer in `model_optim_rng.pt` in a new layout: the inverse of `plain_optimizer` and `members`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ckpt_formats.containers.torchfile_tree import unshare_states
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.names import is_expert
from ckpt_formats.engines.megatron.shared.split import LocalParameter
from ckpt_formats.engines.megatron.shared.write_buffers import STATES
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.state_dicts.extras import tensors_for_names

_FLOAT = DTYPES["float32"]
_EXPERTS = "is_expert_parallel"
_IDENTIFYING: Mapping[str, Value] = {"lr_mult": 1.0, _EXPERTS: False, "is_decoupled_lr": False}
"""Options by which Megatron identifies a group when it loads, with their default values."""


@dataclass(frozen=True)
class WrittenGroup:
    """A parameter group of the new run: its options, its names in the full model, and whether they are of experts."""

    options: Mapping[str, Value]
    names: frozenset[str]
    experts: bool


@dataclass(frozen=True)
class WrittenOptimizer:
    """The optimizer of a target: its groups and other items, and each rank's part of it."""

    target: WriteLayout

    @property
    def separate_experts(self) -> bool:
        """True if experts have an optimizer of their own, as they do if they are distributed over several ranks."""
        return self.target.parallel.ep > 1

    @cached_property
    def trained(self) -> dict[str, Parameter]:
        """The parameters that are in a group. Frozen parameters are in none."""
        grouped = {name for group in self.target.source.groups for name in group.names}
        return {name: p for name, p in self.target.source.parameters.items() if name in grouped}

    @cached_property
    def groups(self) -> list[WrittenGroup]:
        """The source's groups. Groups with equal options are merged.

        If experts have an optimizer of their own, each group is divided into experts and others.
        """
        groups: list[tuple[dict[str, Value], bool, list[str]]] = []
        for group in self.target.source.groups:
            known = {} if self.target.source.origin.engine == "megatron" else _identifying(group.options)
            for experts in (False, True) if self.separate_experts else (None,):
                names = [name for name in group.names if experts is None or is_expert(name) == experts]
                if not names and (group.names or experts):
                    continue
                options = {**known, **group.options}
                if _EXPERTS in options:
                    options[_EXPERTS] = bool(experts)
                same = next((old for old in groups if old[:2] == (options, bool(experts))), None)
                if same is None:
                    groups.append((options, bool(experts), names))
                else:
                    same[2].extend(names)
        ordered = sorted(groups, key=lambda entry: entry[1])
        return [WrittenGroup(options, frozenset(names), experts) for options, experts, names in ordered]

    def check(self, *, frozen: bool = False) -> None:
        """Raise `UnsupportedError` unless every trained parameter is in one group, and all have the same states.

        `frozen` allows parameters that are in no group and have no optimizer states.
        """
        grouped = [name for group in self.target.source.groups for name in group.names]
        parameters = self.target.source.parameters.values()
        known = {p.name for p in parameters if p.role == "parameter" and not (frozen and p.states.keys() <= {MODEL})}
        if odd := sorted(known ^ set(grouped)) or [n for n in grouped if grouped.count(n) > 1]:
            raise UnsupportedError(f"`{printable(odd[0])}` is not in exactly one parameter group of the optimizer")
        trained = list(self.trained.values())
        for parameter in trained:
            self._check_states(parameter, trained[0])

    def _check_states(self, parameter: Parameter, first: Parameter) -> None:
        names, first_names = _state_names(parameter), _state_names(first)
        if names != first_names:
            odd = sorted(names ^ first_names)[0]
            lacks, has = (first, parameter) if odd in names else (parameter, first)
            raise UnsupportedError(
                f"`{printable(lacks.name)}` has no optimizer state `{printable(odd)}`, but `{printable(has.name)}` has",
                hint="Megatron stores the same states for all parameters. --model-only writes only the weights.",
            )
        if MODEL not in parameter.states:
            raise UnsupportedError(f"`{printable(parameter.name)}` has a master, but no weights of the model")
        if MASTER not in parameter.states and parameter.states[MODEL].dtype != _FLOAT:
            raise UnsupportedError(f"`{printable(parameter.name)}` has optimizer states, but no fp32 master")
        if self.target.distributed and (other := names - {*STATES, "step"}):
            raise UnsupportedError(
                f"Megatron's distributed optimizer has no place for `{printable(sorted(other)[0])}`",
                hint="Try --zero 0.",
            )

    def entry(self, chunks: Sequence[Sequence[LocalParameter]], own: Value) -> Value:
        """The optimizer entry of a rank's file; `own` are the optimizer's items that are neither states nor groups."""
        if not self.separate_experts:
            return self._of_rank(chunks, False, of_one(own, 0))
        return [
            self._of_rank(_parameters_of(chunks, experts), experts, of_one(own, int(experts)))
            for experts in (False, True)
        ]

    def _of_rank(self, chunks: Sequence[Sequence[LocalParameter]], experts: bool, own: Mapping[str, Value]) -> Value:
        items = {
            key: tensors_for_names(value, self.target.source.parameters)
            for key, value in own.items()
            if key != "optimizer"
        }
        inner_extras = own.get("optimizer")
        groups = [group for group in self.groups if group.experts == experts]
        members = [
            [parameter for chunk in chunks for parameter in chunk if parameter.model_parameter.name in g.names]
            for g in groups
        ]
        if self.target.distributed:
            step = {} if self.step is None else {"step": self.step}
            inner: dict[str, Value] = {"param_groups": [{**group.options, **step} for group in groups]}
        else:
            inner = _by_number(groups, members)
        if isinstance(inner_extras, dict):
            inner |= {
                key: tensors_for_names(value, self.target.source.parameters) for key, value in inner_extras.items()
            }
        if not self.target.distributed and not self.low_precision:
            return inner | items
        masters = (
            {}
            if self.target.distributed
            else {"fp32_from_fp16_params": [_masters(parameters) for parameters in members]}
        )
        return {"optimizer": inner, **items, **masters}

    @cached_property
    def low_precision(self) -> bool:
        """True if the run has masters of its weights, because they are not float32."""
        low = any(parameter.weight.dtype != _FLOAT for parameter in self.trained.values())
        return low or self.target.args.flag("bf16", "fp16")

    @cached_property
    def step(self) -> Value:
        """The step of all parameters. Raises `UnsupportedError` if parameters have different steps."""
        names_by_step: dict[Value, str] = {}
        with Reader(check=False) as reader:
            for name, parameter in self.trained.items():
                tensor = parameter.states.get("step")
                step = parameter.values.get("step") if tensor is None else read(tensor, reader).item()
                names_by_step.setdefault(step, name)
        if len(names_by_step) > 1:
            (a, first), (b, second) = list(names_by_step.items())[:2]
            raise UnsupportedError(
                f"`{printable(first)}` is at step {a}, but `{printable(second)}` at {b}: Megatron's distributed "
                "optimizer stores one step",
                hint="Try --zero 0 --to megatron-legacy.",
            )
        return next(iter(names_by_step), None)


def optimizer_of(target: WriteLayout, *, frozen: bool = False) -> WrittenOptimizer | None:
    """The optimizer to write, or None if the source has none.

    Raises `UnsupportedError` if Megatron could not load it.
    """
    if target.source.groups:
        optimizer = WrittenOptimizer(target)
        optimizer.check(frozen=frozen)
        return optimizer
    parameters = target.source.parameters.values()
    if odd := next((p for p in parameters if p.role == "parameter" and p.states.keys() - {MODEL, MASTER}), None):
        raise UnsupportedError(
            f"`{printable(odd.name)}` has optimizer states, but the source has no parameter groups",
            where=target.source.path,
            hint="--model-only writes only the weights.",
        )
    return None


def trained_of(chunk: Iterable[LocalParameter]) -> list[LocalParameter]:
    """The parameters of a chunk that an optimizer can have: all but buffers."""
    return [parameter for parameter in chunk if parameter.model_parameter.role == "parameter"]


def computed_weight(parameter: LocalParameter, *, plain: bool) -> Tensor:
    """The weight to write as the model's. Bytes that must agree with it are added as a replica, to be compared.

    The plain optimizer has no masters of float32 weights, so a master in the source must equal the weight.
    """
    weight, master = parameter.states.get(MODEL), parameter.states.get(MASTER)
    if weight is None:
        return parameter.model_parameter.weight
    if not plain or master is None or weight.dtype != _FLOAT or master.shape != weight.shape:
        return weight
    return with_replicas([weight, replace(master, replicas=())])


def _parameters_of(chunks: Sequence[Sequence[LocalParameter]], experts: bool) -> list[list[LocalParameter]]:
    return [[parameter for parameter in chunk if is_expert(parameter.name) == experts] for chunk in chunks]


def _identifying(options: Mapping[str, Value]) -> dict[str, Value]:
    return {"wd_mult": 1.0 if options.get("weight_decay") else 0.0, **_IDENTIFYING}


def of_one(own: Value, number: int) -> Mapping[str, Value]:
    """The items of optimizer `number`; the last one's if the source has fewer optimizers."""
    if isinstance(own, list):
        own = own[min(number, len(own) - 1)] if own else None
    return own if isinstance(own, dict) else {}


def _state_names(parameter: Parameter) -> set[str]:
    """The names of the optimizer states of a parameter, including a step that is a plain number."""
    return set(parameter.states) - {MASTER, MODEL} | ({"step"} & parameter.values.keys())


def _by_number(groups: Sequence[WrittenGroup], members: Sequence[Sequence[LocalParameter]]) -> dict[str, Value]:
    """PyTorch's state dict with numbered parameters.

    Fused optimizers store an integer step for a group, PyTorch's own optimizers a float32 tensor for each parameter.
    """
    state: dict[int, Value] = {}
    listed = []
    number = 0
    for group, parameters in zip(groups, members, strict=True):
        steps = {step for parameter in parameters if isinstance(step := parameter.values.get("step"), int)}
        if len(steps) > 1:
            raise UnsupportedError(
                f"parameters of one group are at the steps {sorted(steps)}, but the optimizer stores one step"
            )
        numbers = range(number, number + len(parameters))
        for parameter in parameters:
            values = {key: value for key, value in parameter.values.items() if key != "step"}
            step = parameter.values.get("step")
            counted = {"step": Tensor.of(ArrayBlob(np.array(step, np.float32)))} if isinstance(step, float) else {}
            states = {to_stored(s): t for s, t in parameter.states.items() if s not in (MASTER, MODEL)}
            if entry := {**unshare_states(states), **counted, **values}:
                state[number] = entry
            number += 1
        listed.append({**group.options, **({"step": steps.pop()} if steps else {}), "params": list(numbers)})
    return {"state": state, "param_groups": listed}


def _masters(parameters: Sequence[LocalParameter]) -> list[Tensor]:
    return [parameter.states[MASTER] for parameter in parameters if parameter.states[MODEL].dtype != _FLOAT]
