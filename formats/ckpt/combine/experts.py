"""Low-rank updates of experts: the layouts in which libraries store them, as one A and one B for each expert.

| layout | names | A | B |
|---|---|---|---|
| per expert | `experts.7.down_proj.lora_A` | (r, in) | (out, r) |
| PEFT's `target_parameters` | `experts.base_layer.lora_A` | (E*r, in): by expert | (out, r*E): by rank |
| stacked | `experts.down_proj.lora_A` | (E, r, in) | (E, out, r) |
| shared | `experts.down_proj.lora_A` | (r, in) or stacked | (out, r) or stacked |

PEFT does not name the parameters that it updates: it nests one module for each, and shapes tell which is which. A model
stores its experts one by one or as a stack, and gate and up projections apart or in one matrix; all of them fit all
layouts.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from ckpt.combine.adapter import MODEL_TYPES, Update, refusal
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import reshaped, rows_of, transposed, unstacked_all, with_shape

ExpertAxes = Literal["out-in", "in-out"]
"""The order of the last two axes of a stack of experts' weights."""

_PLACE = re.compile(r"(?P<root>(?:.+\.)?experts)\.(?:(?P<expert>\d{1,6})\.)?(?P<projection>[^.\d][^.]*)")
_BASE_LAYER = ".base_layer"
GATE_AND_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
GATE_UP = "gate_up_proj"
_MAX_PARAMETERS = 6
"""Of one module that PEFT updates: all orders of them are compared with the shapes."""
_DOWN = ("down_proj", "w2")


@dataclass(frozen=True)
class LowRank:
    """The update B @ A of one matrix."""

    module: str
    """The name by which a configuration may give it a rank and a scale."""
    a: Tensor
    """(r, in)"""
    b: Tensor
    """(out, r)"""

    def outputs(self, start: int, stop: int) -> "LowRank":
        """The update of a range of the outputs. It has all of A."""
        return LowRank(self.module, self.a, rows_of(self.b, [(start, stop)]))


@dataclass(frozen=True)
class ExpertUpdate:
    """The update of one matrix of all experts, as an adapter stores it."""

    module: str
    """As that of `LowRank`."""
    a: Tensor
    b: Tensor
    flattened: bool = False
    """Whether A is (E*r, in) and B (out, r*E), as PEFT stores them."""

    def of_experts(self, count: int, adapter: Checkpoint) -> list[LowRank]:
        """The update of each of so many experts. Raises `CorruptError` if there are fewer or more."""
        a, b = self.a, self.b
        if self.flattened:
            rank, outputs = a.shape[0] // count, b.shape[0]
            if a.shape[0] != rank * count or b.shape[1] != rank * count:
                raise self._misfit(adapter, count)
            by_expert = unstacked_all(transposed(with_shape(b, (outputs * rank, count))))
            each = [
                unstacked_all(with_shape(a, (count, rank, a.shape[1]))),
                [reshaped(one, 0, (outputs, rank)) for one in by_expert],
            ]
        elif any(len(one.shape) == 3 and one.shape[0] != count for one in (a, b)):
            raise self._misfit(adapter, count)
        else:
            each = [unstacked_all(one) if len(one.shape) == 3 else [one] * count for one in (a, b)]
        return [LowRank(self.module, *one) for one in zip(*each, strict=True)]

    def _misfit(self, adapter: Checkpoint, count: int) -> CorruptError:
        return CorruptError(
            f"`{printable(self.module)}` has an update of {list(self.b.shape)} times {list(self.a.shape)}: this is not "
            f"one of {count} experts",
            where=adapter.path,
        )


Updates = dict[str, dict[int | None, ExpertUpdate | LowRank]]
"""Updates by projection, and by expert; the key None is an update of all of them."""


@dataclass(frozen=True)
class ExpertModule:
    """What an adapter has for the experts of one layer."""

    updates: Updates
    wrapped: tuple[ExpertUpdate, ...] = ()
    """Those of PEFT, whose projections are not named, the innermost first."""
    parameters: tuple[str, ...] = ()
    """The projections of these, in any order."""


def expert_modules(
    adapter: Checkpoint, updates: Mapping[str, Update], config: Mapping[str, Value], base: Checkpoint | None = None
) -> tuple[dict[str, ExpertModule], dict[str, Update]]:
    """What an adapter has for experts, by the name of their module in the adapter, such as `layers.0.mlp.experts`; and
    all other updates by module. Experts that the model stores one by one under the same names are among the others.
    """
    targets = config.get("target_parameters") or ()
    if not isinstance(targets, (list, tuple)) or not all(isinstance(target, str) for target in targets):
        raise CorruptError("`target_parameters` is not a list of names", where=adapter.path)
    wrapped = defaultdict[str, dict[int, ExpertUpdate]](dict)
    named = defaultdict[str, Updates](lambda: defaultdict(dict))
    others = dict[str, Update]()
    ends: set[str] | None = None
    for module, update in updates.items():
        root, depth = module, 0
        while root.endswith(_BASE_LAYER):
            root, depth = root.removesuffix(_BASE_LAYER), depth + 1
        if _parameters_of(root, targets):
            wrapped[root][depth] = _update(adapter, module, update, flattened=True)
            continue
        match = _PLACE.fullmatch(module)
        ends = _ends(base) if ends is None else ends
        if match is None or {f"{module}.weight", f"{module.partition('.')[2]}.weight"} & ends:
            others[module] = update
            continue
        one = _update(adapter, module, update)
        expert = None if match["expert"] is None else int(match["expert"])
        if expert is not None and (len(one.a.shape), len(one.b.shape)) != (2, 2):
            raise refusal(adapter, f"module `{printable(module)}` has a stack for one expert")
        named[match["root"]][match["projection"]][expert] = one if expert is None else LowRank(module, one.a, one.b)
    if targets and not wrapped:
        raise IncompleteError(
            f"the adapter has no updates of the parameters that it states: {list_names(targets, printable)}",
            where=adapter.path,
        )
    modules = {root: ExpertModule(dict(one)) for root, one in named.items()}
    for root, levels in wrapped.items():
        parameters = _parameters_of(root, targets)
        if len(parameters) > _MAX_PARAMETERS:
            raise refusal(
                adapter, f"`{printable(root)}`: the adapter updates {len(parameters)} parameters of one module"
            )
        if sorted(levels) != list(range(len(parameters))):
            raise refusal(
                adapter,
                f"module `{printable(root)}` has {len(levels)} updates for its {len(parameters)} parameters: "
                f"{list_names(parameters, printable)}",
            )
        innermost_first = tuple(levels[depth] for depth in sorted(levels, reverse=True))
        modules[root] = ExpertModule(modules[root].updates if root in modules else {}, innermost_first, parameters)
    return modules, others


def _parameters_of(root: str, targets: Sequence[str]) -> tuple[str, ...]:
    """The names of the parameters of a module among PEFT's `target_parameters`."""
    paths = (target.rpartition(".") for target in targets)
    return tuple(sorted({name for path, _, name in paths if path and f".{root}".endswith(f".{path}")}))


def _update(adapter: Checkpoint, module: str, update: Update, flattened: bool = False) -> ExpertUpdate:
    if absent := sorted({"lora_A", "lora_B"} - update.keys()):
        raise IncompleteError(f"module `{printable(module)}` lacks {list_names(absent, printable)}", where=adapter.path)
    if surplus := sorted(update.keys() - {"lora_A", "lora_B"}):
        raise refusal(adapter, f"module `{printable(module)}` of experts has {list_names(surplus, printable)}")
    a, b = update["lora_A"], update["lora_B"]
    if any(len(one.shape) not in ((2,) if flattened else (2, 3)) for one in (a, b)):
        raise refusal(adapter, f"module `{printable(module)}` has an update of {list(b.shape)} times {list(a.shape)}")
    for one in (a, b):
        if one.dtype.name not in MODEL_TYPES:
            raise refusal(adapter, f"module `{printable(module)}` holds {one.dtype.name} values")
    return ExpertUpdate(module, a, b, flattened)


def _ends(base: Checkpoint | None) -> set[str]:
    """All names of weights of experts, also without some of their first parts."""
    ends = set()
    for name in () if base is None else (*base.parameters, *base.aliases):
        while "experts." in name:
            ends.add(name)
            name = name.partition(".")[2]
    return ends


# --- where a model stores its experts ---


@dataclass(frozen=True)
class ExpertWeights:
    """Where a model stores one projection of all experts."""

    names: tuple[str, ...]
    """One for each expert, or that of a stack."""
    shape: Shape
    """Of each expert's weight."""
    count: int
    is_stack: bool


@dataclass(frozen=True)
class ExpertTarget:
    """Weights that an update changes: some of the update's outputs, some of the weights' outputs."""

    weights: ExpertWeights
    update_part: int | None = None
    """Of an update of gate and up: the half that these weights are; None: all of it."""
    weight_part: int | None = None
    """Of weights of gate and up: the part that the update is of; None: all of them."""


class StoredExperts:
    """The experts of a model, by the name of their module and the projection."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self._stacks: dict[str, dict[str, str]] = defaultdict(dict)
        self._singles: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        for name, parameter in base.parameters.items():
            match = _PLACE.fullmatch(name.removesuffix(".weight")) if "experts." in name else None
            axes = len(parameter.weight.shape) if match is not None else 0
            if match is not None and match["expert"] is not None and axes == 2:
                self._singles[match["root"]][match["projection"]][int(match["expert"])] = name
            elif match is not None and match["expert"] is None and axes == 3:
                self._stacks[match["root"]][match["projection"]] = name

    def weights(self, root: str, projection: str) -> ExpertWeights | None:
        """The weights of a projection; None if the model has none of this name."""
        name = self._stacks[root].get(projection) if root in self._stacks else None
        if name is None and len(self._shape(f"{root}.{projection}")) == 3:
            name = f"{root}.{projection}"  # a stack whose module has another name than `experts`
        if name is not None:
            count, *shape = self._shape(name)
            return ExpertWeights((name,), tuple(shape), count, True)
        singles = self._singles[root].get(projection, {}) if root in self._singles else {}
        names = tuple(singles[expert] for expert in sorted(singles))
        shapes = {self._shape(name) for name in names}
        if not names or sorted(singles) != list(range(len(names))) or len(shapes) != 1:
            return None
        return ExpertWeights(names, shapes.pop(), len(names), False)

    def targets(self, root: str, projection: str) -> tuple[ExpertTarget, ...]:
        """The weights that an update of a projection changes; none if the model has no such projection."""
        if weights := self.weights(root, projection):
            return (ExpertTarget(weights),)
        if projection == GATE_UP:
            for names in GATE_AND_UP:
                parts = [self.weights(root, name) for name in names]
                if all(part is not None for part in parts):
                    return tuple(ExpertTarget(part, i) for i, part in enumerate(parts) if part is not None)
        for names in GATE_AND_UP:
            if projection in names and (weights := self.weights(root, GATE_UP)):
                return (ExpertTarget(weights, None, names.index(projection)),)
        if projection in _DOWN:
            other = _DOWN[1 - _DOWN.index(projection)]
            if weights := self.weights(root, other):
                return (ExpertTarget(weights),)
        return ()

    def _shape(self, name: str) -> Shape:
        return self._base.parameters[name].weight.shape if name in self._base.parameters else ()


def fits(targets: Sequence[ExpertTarget], outputs: int, inputs: int) -> frozenset[bool]:
    """How an update of so many outputs and inputs fits weights: whether they may be stored as (in, out), as (out, in).

    Both, if the weights are square; neither, if the update does not fit.
    """
    possible = {False, True} if targets else set[bool]()
    for target in targets:
        is_half = target.update_part is not None
        rows = outputs // 2 if is_half else outputs
        wanted = (2 * rows if target.weight_part is not None else rows, inputs)
        readings = {False} if wanted == target.weights.shape else set[bool]()
        if target.weights.is_stack and wanted == target.weights.shape[::-1]:
            readings.add(True)
        possible &= readings if not is_half or outputs % 2 == 0 else set()
    return frozenset(possible)


def with_projections(
    adapter: Checkpoint, module: ExpertModule, own_root: str, root: str, stored: StoredExperts
) -> Updates:
    """The updates of a module by projection, also those that PEFT does not name. The module is `own_root` in the
    adapter, `root` in the model.

    Raises `UnsupportedError` if their shapes fit no order of the projections, or several.
    """
    updates = {name: dict(one) for name, one in module.updates.items()}
    if not module.wrapped:
        return updates
    fitting = [
        order
        for order in permutations(module.parameters)
        if all(
            fits(stored.targets(root, name), update.b.shape[-2], update.a.shape[-1])
            for name, update in zip(order, module.wrapped, strict=True)
        )
    ]
    shapes = ", ".join(f"{list(one.b.shape)} times {list(one.a.shape)}" for one in module.wrapped)
    if not fitting:
        raise IncompleteError(
            f"the model has no weights in `{printable(root)}` for updates of {shapes} of "
            f"{list_names(module.parameters, printable)}",
            where=adapter.path,
            hint="Is this the model that the adapter was trained for?",
        )
    if len(fitting) > 1:
        raise refusal(
            adapter,
            f"updates of {shapes} of `{printable(root)}` could be of {list_names(module.parameters, printable)} in "
            "several orders",
        )
    for name, update in zip(fitting[0], module.wrapped, strict=True):
        updates.setdefault(name, {})[None] = ExpertUpdate(f"{own_root}.{name}", update.a, update.b, True)
    return updates


def of_each_expert(
    update: Mapping[int | None, ExpertUpdate | LowRank], count: int, adapter: Checkpoint
) -> Iterator[tuple[int, LowRank]]:
    """The update of each expert that has one, in the order of experts."""
    whole = update.get(None)
    if isinstance(whole, ExpertUpdate):
        if len(update) > 1:
            raise refusal(adapter, f"`{printable(whole.module)}` has updates for all experts and for single ones")
        yield from enumerate(whole.of_experts(count, adapter))
        return
    for expert in sorted(expert for expert in update if expert is not None):
        one = update[expert]
        if expert >= count:
            raise IncompleteError(
                f"the model has {count} experts, but the adapter updates expert {expert}", where=adapter.path
            )
        assert isinstance(one, LowRank)
        yield expert, one
