"""The optimizer in `model_optim_rng.pt` of a new layout: the inverse of `plain_optimizer` and of `members`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ckpt_formats.containers.torchfile_tree import unshare_states
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.files import Reader
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
_TELLING: Mapping[str, Value] = {"lr_mult": 1.0, _EXPERTS: False, "is_decoupled_lr": False}
"""Options by which Megatron finds a group again, and what they are by default."""


@dataclass(frozen=True)
class WrittenGroup:
    """A parameter group of the new run: its options, and the names in the whole model."""

    options: Mapping[str, Value]
    names: frozenset[str]
    experts: bool


@dataclass(frozen=True)
class WrittenOptimizer:
    """The optimizer of a target: its groups, what else it keeps, and what each rank has of it."""

    target: WriteLayout

    @property
    def apart(self) -> bool:
        """Have experts an optimizer of their own? So it is where they lie on several ranks."""
        return self.target.parallel.ep > 1

    @cached_property
    def trained(self) -> dict[str, Parameter]:
        """What is in a group. A frozen parameter is in none."""
        grouped = {name for group in self.target.source.groups for name in group.names}
        return {name: p for name, p in self.target.source.parameters.items() if name in grouped}

    @cached_property
    def groups(self) -> list[WrittenGroup]:
        """Those of the source, experts apart where they have an optimizer of their own; alike ones are one."""
        found: list[tuple[dict[str, Value], bool, list[str]]] = []
        for group in self.target.source.groups:
            known = {} if self.target.source.origin.engine == "megatron" else _telling(group.options)
            for experts in (False, True) if self.apart else (None,):
                names = [name for name in group.names if experts is None or is_expert(name) == experts]
                if not names and (group.names or experts):
                    continue
                options = {**known, **group.options}
                if _EXPERTS in options:
                    options[_EXPERTS] = bool(experts)
                same = next((old for old in found if old[:2] == (options, bool(experts))), None)
                if same is None:
                    found.append((options, bool(experts), names))
                else:
                    same[2].extend(names)
        ordered = sorted(found, key=lambda one: one[1])
        return [WrittenGroup(options, frozenset(names), experts) for options, experts, names in ordered]

    def check(self, *, frozen: bool = False) -> None:
        """Raises `Unsupported` unless every trained parameter is in one group and has all that the others have.

        `frozen` says that there may be parameters in no group, of which the optimizer knows nothing.
        """
        grouped = [name for group in self.target.source.groups for name in group.names]
        parameters = self.target.source.parameters.values()
        known = {p.name for p in parameters if p.role == "parameter" and not (frozen and p.states.keys() <= {MODEL})}
        if odd := sorted(known ^ set(grouped)) or [n for n in grouped if grouped.count(n) > 1]:
            raise Unsupported(f"`{printable(odd[0])}` is not in exactly one parameter group of the optimizer")
        trained = list(self.trained.values())
        for parameter in trained:
            self._check_states(parameter, trained[0])

    def _check_states(self, parameter: Parameter, first: Parameter) -> None:
        ours, theirs = _kept(parameter), _kept(first)
        if ours != theirs:
            odd = sorted(ours ^ theirs)[0]
            lacks, has = (first, parameter) if odd in ours else (parameter, first)
            raise Unsupported(
                f"`{printable(lacks.name)}` has no optimizer state `{printable(odd)}`, but `{printable(has.name)}` has",
                hint="Megatron keeps the same of every trained parameter. --model-only writes the weights alone.",
            )
        if MODEL not in parameter.states:
            raise Unsupported(f"`{printable(parameter.name)}` has a master, but not the model's own values")
        if MASTER not in parameter.states and parameter.states[MODEL].dtype != _FLOAT:
            raise Unsupported(f"`{printable(parameter.name)}` has optimizer states, but no fp32 master")
        if self.target.distributed and (other := ours - {*STATES, "step"}):
            raise Unsupported(
                f"Megatron's distributed optimizer has no place for `{printable(sorted(other)[0])}`",
                hint="Try --zero 0.",
            )

    def entry(self, chunks: Sequence[Sequence[LocalParameter]], own: Value) -> Value:
        """What a rank saves; `own` is what its optimizer kept beside states and groups."""
        if not self.apart:
            return self._of_rank(chunks, False, of_one(own, 0))
        return [self._of_rank(_those(chunks, experts), experts, of_one(own, int(experts))) for experts in (False, True)]

    def _of_rank(self, chunks: Sequence[Sequence[LocalParameter]], experts: bool, own: Mapping[str, Value]) -> Value:
        items = {
            key: tensors_for_names(value, self.target.source.parameters)
            for key, value in own.items()
            if key != "optimizer"
        }
        rest = own.get("optimizer")
        groups = [group for group in self.groups if group.experts == experts]
        members = [[one for chunk in chunks for one in chunk if one.parameter.name in g.names] for g in groups]
        if self.target.distributed:
            step = {} if self.step is None else {"step": self.step}
            inner: dict[str, Value] = {"param_groups": [{**group.options, **step} for group in groups]}
        else:
            inner = _by_number(groups, members)
        if isinstance(rest, dict):
            inner |= {key: tensors_for_names(value, self.target.source.parameters) for key, value in rest.items()}
        if not self.target.distributed and not self.low_precision:
            return inner | items
        masters = {} if self.target.distributed else {"fp32_from_fp16_params": [_masters(held) for held in members]}
        return {"optimizer": inner, **items, **masters}

    @cached_property
    def low_precision(self) -> bool:
        """Does the run keep masters of its weights?"""
        low = any(parameter.weight.dtype != _FLOAT for parameter in self.trained.values())
        return low or self.target.args.flag("bf16", "fp16")

    @cached_property
    def step(self) -> Value:
        """The step that the distributed optimizer keeps for all parameters. Raises `Unsupported` if they differ."""
        found: dict[Value, str] = {}
        with Reader(check=False) as reader:
            for name, parameter in self.trained.items():
                tensor = parameter.states.get("step")
                step = parameter.values.get("step") if tensor is None else read(tensor, reader).item()
                found.setdefault(step, name)
        if len(found) > 1:
            (a, first), (b, second) = list(found.items())[:2]
            raise Unsupported(
                f"`{printable(first)}` has made {a} steps, `{printable(second)}` {b}: Megatron's distributed "
                "optimizer keeps one",
                hint="Try --zero 0 --to megatron-legacy.",
            )
        return next(iter(found), None)


def optimizer_of(target: WriteLayout, *, frozen: bool = False) -> WrittenOptimizer | None:
    """None if the source has none. Raises `Unsupported` for one that Megatron could not load."""
    if target.source.groups:
        found = WrittenOptimizer(target)
        found.check(frozen=frozen)
        return found
    parameters = target.source.parameters.values()
    if odd := next((p for p in parameters if p.role == "parameter" and p.states.keys() - {MODEL, MASTER}), None):
        raise Unsupported(
            f"`{printable(odd.name)}` has optimizer states, but nothing says which parameter groups there are",
            where=target.source.path,
            hint="--model-only writes the weights alone.",
        )
    return None


def trained_of(chunk: Iterable[LocalParameter]) -> list[LocalParameter]:
    """What the optimizer knows of a chunk."""
    return [one for one in chunk if one.parameter.role == "parameter"]


def compared(one: LocalParameter, *, plain: bool) -> Tensor:
    """What the model computes with. The plain optimizer has no masters of fp32 weights: they must be the weights."""
    weight, master = one.states.get(MODEL), one.states.get(MASTER)
    if weight is None:
        return one.parameter.weight
    if not plain or master is None or weight.dtype != _FLOAT or master.shape != weight.shape:
        return weight
    return with_replicas([weight, replace(master, replicas=())])


def _those(chunks: Sequence[Sequence[LocalParameter]], experts: bool) -> list[list[LocalParameter]]:
    return [[one for one in chunk if is_expert(one.name) == experts] for chunk in chunks]


def _telling(options: Mapping[str, Value]) -> dict[str, Value]:
    return {"wd_mult": 1.0 if options.get("weight_decay") else 0.0, **_TELLING}


def of_one(own: Value, number: int) -> Mapping[str, Value]:
    """What one of several optimizers kept, whether the source had as many or one."""
    if isinstance(own, list):
        own = own[min(number, len(own) - 1)] if own else None
    return own if isinstance(own, dict) else {}


def _kept(parameter: Parameter) -> set[str]:
    """The optimizer's states; a step may be a plain number."""
    return set(parameter.states) - {MASTER, MODEL} | ({"step"} & parameter.values.keys())


def _by_number(groups: Sequence[WrittenGroup], members: Sequence[Sequence[LocalParameter]]) -> dict[str, Value]:
    """PyTorch's state dict. Fused optimizers count steps, as whole numbers, for a group; PyTorch's for a parameter."""
    state: dict[int, Value] = {}
    listed = []
    number = 0
    for group, held in zip(groups, members, strict=True):
        steps = {step for one in held if isinstance(step := one.values.get("step"), int)}
        if len(steps) > 1:
            raise Unsupported(f"parameters of one group have made {sorted(steps)} steps, but the optimizer keeps one")
        numbers = range(number, number + len(held))
        for one in held:
            values = {key: value for key, value in one.values.items() if key != "step"}
            step = one.values.get("step")
            counted = {"step": Tensor.of(ArrayBlob(np.array(step, np.float32)))} if isinstance(step, float) else {}
            states = {s: t for s, t in one.states.items() if s not in (MASTER, MODEL)}
            if kept := {**unshare_states(states), **counted, **values}:
                state[number] = kept
            number += 1
        listed.append({**group.options, **({"step": steps.pop()} if steps else {}), "params": list(numbers)})
    return {"state": state, "param_groups": listed}


def _masters(held: Sequence[LocalParameter]) -> list[Tensor]:
    return [one.states[MASTER] for one in held if one.states[MODEL].dtype != _FLOAT]
