"""The optimizer states and parameter groups of one rank: classes and functions that all encodings share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.core.checkpoint import Group, Parameter
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.names import HEAD, WORD_TABLE
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf

Key = tuple[int, str]
"""The number of a model chunk of the rank, and a local name in it."""

_QK_NORMS = tuple(f"{which}_layernorm.{kind}" for which in "qk" for kind in ("weight", "bias"))


@dataclass(frozen=True)
class OptimizerGroup:
    """A parameter group: its options, and the keys of its parameters."""

    options: Mapping[str, Value]
    keys: tuple[Key, ...]


@dataclass
class OptimizerStates:
    """The states (in local shapes) and plain values of each parameter, and the groups."""

    states: dict[Key, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[Key, dict[str, Value]] = field(default_factory=dict)
    groups: list[OptimizerGroup] = field(default_factory=list)

    def add_step(self, key: Key, step: Value) -> None:
        """Set the step of a parameter from its group, unless the parameter has one. Fused optimizers store it there."""
        if isinstance(step, Leaf):
            self.states[key].setdefault("step", tensor_leaf(step))
        elif step is not None and "step" not in self.states[key]:
            self.values.setdefault(key, {}).setdefault("step", step)


def members(
    groups: Sequence[Value],
    keyed_shapes: Iterable[tuple[Key, Shape]],
    experts: bool | None,
    where: Path,
    decayed_norms: bool = False,
) -> list[list[Key]]:
    """The keys of the parameters in each group.

    Groups have no names, so parameters are assigned by the groups' options, as Megatron does: biases and vectors have
    no weight decay, experts have groups of their own, and so may the tables of the vocabulary, with a learning rate of
    their own. If `decayed_norms`, weight decay applies to the norms of queries and keys
    (`--apply-wd-to-qk-layernorm`). Raises `UnsupportedError` if a parameter does not fit exactly one group.
    """
    keys_by_group: list[list[Key]] = [[] for _ in groups]
    for (chunk, name), shape in keyed_shapes:
        fitting = [
            i for i, group in enumerate(groups) if _fits(group, name, decayed(name, shape, decayed_norms), experts)
        ]
        if len(fitting) != 1:
            raise UnsupportedError(
                f"`{name}` fits {len(fitting)} of the optimizer's {len(groups)} parameter groups, which have no names",
                where=where,
                hint="Groups are distinguished by weight decay, experts and decoupled learning rates.",
            )
        keys_by_group[fitting[0]].append((chunk, name))
    return keys_by_group


def without_states(parameters: Mapping[str, Parameter], groups: Sequence[Group]) -> Iterator[Notice]:
    """A notice of the parameters that are in no group, if there are groups."""
    grouped = {name for group in groups for name in group.names}
    ungrouped = tuple(name for name, p in parameters.items() if p.role == "parameter" and name not in grouped)
    if grouped and ungrouped:
        text = "the optimizer has no state of these parameters: they are frozen, or their states are missing"
        yield Notice(text, ungrouped, Weight.UNSURE)


def options_of(group: Value, where: Path) -> dict[str, Value]:
    """The options of a parameter group, without its list of parameters.

    Raises `CorruptError` if it is not a mapping.
    """
    if not isinstance(group, dict):
        raise CorruptError("a parameter group is not a mapping", where=where)
    return {str(key): value for key, value in group.items() if key != "params"}


def decayed(name: str, shape: Shape, norms: bool) -> bool:
    """True if weight decay applies to a parameter; `norms`: also to the norms of queries and keys."""
    if norms and name.endswith(_QK_NORMS):
        return True
    return not (name.endswith(".bias") or len(shape) == 1)


def _fits(group: Value, name: str, decays: bool, experts: bool | None) -> bool:
    multiplier = group.get("wd_mult", 1.0 if group.get("weight_decay") else 0.0)
    if bool(multiplier) != decays:
        return False
    if experts is not None and bool(group.get("is_expert_parallel", experts)) != experts:
        return False
    table = name.endswith((WORD_TABLE, HEAD))
    return bool(group.get("is_decoupled_lr")) <= table
