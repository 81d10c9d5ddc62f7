"""An adapter whose updates of experts are stored in another layout: the same numbers, moved."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal

from ckpt.combine.adapter import PREFIX, adapter_config, adapter_tensors, lora_module, pattern_value, refusal
from ckpt.combine.experts import (
    GATE_AND_UP,
    GATE_UP,
    ExpertModule,
    ExpertUpdate,
    LowRank,
    expert_modules,
    of_each_expert,
)
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Edit, Parameter
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor, ZeroBlob, checked_read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import (
    LayersBlob,
    concatenated,
    group_rows,
    interleaved,
    permuted,
    rows_of,
    transposed,
    with_shape,
)

ExpertLayout = Literal["per-expert", "peft", "stacked", "shared"]
"""A layout of updates of experts: see `experts`."""
GateUpRows = Literal["halves", "in-turn"]
"""How one matrix has the rows of the gate and of the up projection."""

_CONFIG = "hf/adapter_config.json"
_PEFT_PARAMETERS = (GATE_UP, "down_proj")


@dataclass(frozen=True)
class ConvertExperts(Edit):
    """Updates of experts in another layout."""

    layout: ExpertLayout
    gate_up: GateUpRows | None


@dataclass(frozen=True)
class _Projection:
    """The updates of one projection of all experts, with the factor by which B @ A is multiplied."""

    updates: tuple[LowRank, ...]
    alpha: float

    @property
    def rank(self) -> int:
        return self.updates[0].a.shape[0]

    def stack(self, kind: Literal["a", "b"]) -> Tensor:
        """(E, r, in) or (E, out, r)."""
        tensors: dict[Shape, Tensor] = {(i,): one.a if kind == "a" else one.b for i, one in enumerate(self.updates)}
        return Tensor.of(LayersBlob((len(tensors),), tensors))


_Projections = dict[str, _Projection]


@checked
def convert_lora(adapter: Checkpoint, layout: ExpertLayout, gate_up: GateUpRows | None = None) -> Checkpoint:
    """The adapter with its updates of experts in another layout; all else stays as it is.

    "per-expert": A and B of each expert, with gate and up projections apart. "peft": PEFT's `target_parameters`, with
    gate and up in one matrix. "stacked": (experts, ...) for each projection. "shared": the same, but an A or B that is
    equal for all experts is stored once. `gate_up` states the rows of gate and up in one matrix, "halves" or "in-turn"
    (GPT-OSS); ckpt needs it where they are split or joined.

    Every product B @ A has the same bits in each layout. If gate and up are split, both have the same A. If they are
    joined and have different A, the result has both, of rank 2 r, and zeros in B. To compare matrices, ckpt reads those
    of gate and up for "peft", and all for "shared"; for all else it reads nothing.

    Raises `UnsupportedError` for adapters that have no updates of experts or do not fit the layout, and as
    `merge_lora`.
    """
    config = adapter_config(adapter)
    updates, _ = adapter_tensors(adapter)
    modules, others = expert_modules(adapter, updates, config)
    if not modules:
        raise refusal(adapter, "the adapter has no updates of experts", "Only these have several layouts.")
    prefix = PREFIX if any(name.startswith(PREFIX) for name in adapter.parameters) else ""
    parameters = {
        name: one
        for name, one in adapter.parameters.items()
        if one.role == "extra" or (module := lora_module(name)) is None or module in others
    }
    unchanged = set(parameters)
    stated = dict[str, _Projection]()
    for root, experts in modules.items():
        projections = _projections(adapter, config, root, experts)
        if layout == "per-expert":
            projections = _split(adapter, projections, gate_up)
        elif layout == "peft":
            projections = _joined(adapter, config, projections, gate_up)
        for stored, tensor, key, projection in _stored(adapter, root, projections, layout):
            name = f"{prefix}{stored}.weight"
            parameters[name] = Parameter(name, "parameter", {MODEL: tensor})
            stated[key] = projection
    new_config = _new_config(adapter, config, stated, others, layout)
    return edited(
        adapter,
        ConvertExperts(layout, gate_up),
        parameters=parameters,
        extras={**adapter.extras, _CONFIG: new_config},
        digests={key: value for key, value in adapter.digests.items() if key[0] in unchanged},
        errors={key: value for key, value in adapter.errors.items() if key[0] in unchanged},
    )


def _projections(adapter: Checkpoint, config: Mapping[str, Value], root: str, module: ExpertModule) -> _Projections:
    """The updates of each expert, by projection."""
    named = {name: dict(one) for name, one in module.updates.items()}
    counts = {count for update in named.values() if (count := _count(update))}
    if module.wrapped:
        order, count = _order(adapter, config, root, module)
        counts.add(count)
        for name, wrapped in zip(order, module.wrapped, strict=True):
            named.setdefault(name, {})[None] = replace(wrapped, module=f"{root}.{name}")
    if len(counts) != 1:
        what = (
            f"are of {' and '.join(map(str, sorted(counts)))} experts" if counts else "do not state how many there are"
        )
        raise refusal(adapter, f"the updates of experts in `{printable(root)}` {what}", "Merge it with its model.")
    (count,) = counts
    result = {}
    for name, update in named.items():
        experts = dict(of_each_expert(update, count, adapter))
        if len(experts) != count:
            raise refusal(adapter, f"`{printable(root)}` has updates of `{printable(name)}` for some experts only")
        result[name] = _projection(adapter, config, [experts[expert] for expert in range(count)])
    return result


def _projection(adapter: Checkpoint, config: Mapping[str, Value], updates: Sequence[LowRank]) -> _Projection:
    """Raises `UnsupportedError` if experts have several shapes, types, ranks or scales."""
    first = updates[0]
    module = printable(first.module)
    kinds = {(one.a.shape, one.b.shape, one.a.dtype, one.b.dtype) for one in updates}
    alphas = {pattern_value(adapter, config, "alpha_pattern", "lora_alpha", one.module) for one in updates}
    ranks = {pattern_value(adapter, config, "rank_pattern", "r", one.module) for one in updates}
    rank = first.a.shape[0]
    if len(kinds) > 1 or len(alphas) > 1 or first.b.shape[1] != rank:
        raise refusal(adapter, f"the experts of `{module}` have updates of several shapes, types or scales")
    if ranks != {rank}:
        raise refusal(adapter, f"`{module}` has rank {rank}, but adapter_config.json states {sorted(ranks)[0]}")
    return _Projection(tuple(updates), alphas.pop())


def _count(update: Mapping[int | None, ExpertUpdate | LowRank]) -> int:
    """How many experts an update is of; 0 if it does not show that."""
    whole = update.get(None)
    if whole is None:
        return max(expert for expert in update if expert is not None) + 1
    return next((one.shape[0] for one in (whole.a, whole.b) if len(one.shape) == 3), 0)


def _order(
    adapter: Checkpoint, config: Mapping[str, Value], root: str, module: ExpertModule
) -> tuple[tuple[str, ...], int]:
    """The projections of the updates of PEFT, the innermost first, and the number of experts.

    Raises `UnsupportedError` if the shapes fit no order, or several.
    """
    fitting = []
    for order in permutations(module.parameters):
        by_name = dict(zip(order, module.wrapped, strict=True))
        ranks = {name: pattern_value(adapter, config, "rank_pattern", "r", f"{root}.{name}") for name in order}
        counts = {one.a.shape[0] / ranks[name] if ranks[name] >= 1 else 0 for name, one in by_name.items()}
        gate_up, down = by_name.get(GATE_UP), by_name.get("down_proj")
        if gate_up is not None and down is not None:
            hidden, ffn = gate_up.a.shape[1], down.a.shape[1]
            if (gate_up.b.shape[0], down.b.shape[0]) != (2 * ffn, hidden):
                continue
        if len(counts) == 1 and (count := counts.pop()) >= 1 and count == int(count):
            fitting.append((order, int(count)))
    if len(fitting) != 1:
        shapes = ", ".join(f"{list(one.b.shape)} times {list(one.a.shape)}" for one in module.wrapped)
        raise refusal(
            adapter,
            f"which updates of {shapes} of `{printable(root)}` belong to {', '.join(module.parameters)} is unknown",
        )
    return fitting[0]


def _split(adapter: Checkpoint, projections: _Projections, gate_up: GateUpRows | None) -> _Projections:
    """The projections with gate and up apart: both have the A of the update of both."""
    if GATE_UP not in projections:
        return projections
    both, rest = projections[GATE_UP], {name: one for name, one in projections.items() if name != GATE_UP}
    names = GATE_AND_UP[0]
    if both.updates[0].b.shape[0] % 2 or set(names) & rest.keys():
        raise refusal(adapter, f"the update of `{GATE_UP}` cannot be split into gate and up")
    rows, in_turn = both.updates[0].b.shape[0] // 2, _is_in_turn(adapter, gate_up)

    def part(one: LowRank, i: int) -> LowRank:
        b = group_rows(one.b, rows, i, i + 1) if in_turn else rows_of(one.b, [(i * rows, (i + 1) * rows)])
        return LowRank(one.module, one.a, b)

    parts = {name: replace(both, updates=tuple(part(one, i) for one in both.updates)) for i, name in enumerate(names)}
    return {**parts, **rest}


def _joined(
    adapter: Checkpoint, config: Mapping[str, Value], projections: _Projections, gate_up: GateUpRows | None
) -> _Projections:
    """The projections with gate and up in one matrix."""
    result = dict(projections)
    names = next((names for names in GATE_AND_UP if set(names) & projections.keys()), None)
    if names is not None:
        if not set(names) <= projections.keys() or GATE_UP in projections:
            raise refusal(
                adapter, f"PEFT updates gate and up together, but the adapter has one of {' and '.join(names)}"
            )
        in_turn = _is_in_turn(adapter, gate_up)
        result[GATE_UP] = _both(adapter, config, result.pop(names[0]), result.pop(names[1]), in_turn)
    if "w2" in result and "down_proj" not in result:
        result["down_proj"] = result.pop("w2")
    if unknown := sorted(result.keys() - {*_PEFT_PARAMETERS}):
        raise refusal(adapter, f"the order in which PEFT nests {', '.join(map(printable, unknown))} is unknown")
    return result


def _both(
    adapter: Checkpoint, config: Mapping[str, Value], gate: _Projection, up: _Projection, in_turn: bool
) -> _Projection:
    """One update of gate and up: with their A if that is the same, else with both and zeros in B."""
    if gate.updates[0].b.shape[0] != up.updates[0].b.shape[0] or len(gate.updates) != len(up.updates):
        raise refusal(adapter, "the updates of gate and up have several shapes")

    def rows(first: Tensor, second: Tensor) -> Tensor:
        return interleaved([first, second], first.shape[0]) if in_turn else concatenated([first, second])

    pairs = list(zip(gate.updates, up.updates, strict=True))
    if gate.alpha == up.alpha and all(_is_equal(adapter, one.a, other.a) for one, other in pairs):
        return _Projection(tuple(LowRank(x.module, x.a, rows(x.b, y.b)) for x, y in pairs), gate.alpha)

    def scale(alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    rank = gate.rank + up.rank
    factor = scale(gate.alpha, gate.rank)
    alpha = factor * (math.sqrt(rank) if config.get("use_rslora") else rank)
    if scale(up.alpha, up.rank) != factor or scale(alpha, rank) != factor:
        raise refusal(adapter, f"gate and up have different A, and no update of rank {rank} has exactly their scale")
    updates = []
    for x, y in pairs:
        zeros = [Tensor.of(ZeroBlob((one.a.shape[0], one.b.shape[0]), one.b.dtype)) for one in (y, x)]
        first = transposed(concatenated([transposed(x.b), zeros[0]]))
        second = transposed(concatenated([zeros[1], transposed(y.b)]))
        updates.append(LowRank(x.module, concatenated([x.a, y.a]), rows(first, second)))
    return _Projection(tuple(updates), alpha)


def _is_in_turn(adapter: Checkpoint, gate_up: GateUpRows | None) -> bool:
    if gate_up is None:
        raise UnsupportedError(
            "the adapter does not tell whether one matrix has the rows of gate and up in turn or as two halves",
            where=adapter.path,
            hint="State it: --gate-up in-turn for GPT-OSS, --gate-up halves for all other families.",
        )
    return gate_up == "in-turn"


def _is_equal(adapter: Checkpoint, first: Tensor, second: Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first == second:
        return True
    both = (checked_read(one, adapter.identities) for one in (first, second))
    return next(both).tobytes() == next(both).tobytes()


def _stored(
    adapter: Checkpoint, root: str, projections: _Projections, layout: ExpertLayout
) -> Iterator[tuple[str, Tensor, str, _Projection]]:
    """The tensors of a module: each with its name, the module by which PEFT finds its rank and scale, and updates."""
    if layout == "peft":
        present = [name for name in _PEFT_PARAMETERS if name in projections]
        for depth, name in enumerate(reversed(present)):
            one, module = projections[name], f"{root}{'.base_layer' * depth}"
            a, b = one.stack("a"), permuted(one.stack("b"), (1, 2, 0))
            columns = one.rank * len(one.updates)
            yield f"{module}.lora_A", with_shape(a, (columns, a.shape[2])), f"{root}.{name}", one
            yield f"{module}.lora_B", with_shape(b, (b.shape[0], columns)), f"{root}.{name}", one
        return
    for name, one in projections.items():
        if layout == "per-expert":
            for expert, update in enumerate(one.updates):
                module = f"{root}.{expert}.{name}"
                yield f"{module}.lora_A", update.a, module, one
                yield f"{module}.lora_B", update.b, module, one
            continue
        a, b = one.stack("a"), one.stack("b")
        if layout == "shared":
            first = one.updates[0]
            shared_a = all(_is_equal(adapter, first.a, other.a) for other in one.updates[1:])
            shared_b = all(_is_equal(adapter, first.b, other.b) for other in one.updates[1:])
            if not shared_a and not shared_b:
                raise refusal(adapter, f"the experts of `{printable(root)}.{printable(name)}` share neither A nor B")
            a, b = first.a if shared_a else a, first.b if shared_b else b
            if shared_a and shared_b:  # a stack states how many experts there are
                b = one.stack("b")
        yield f"{root}.{name}.lora_A", a, f"{root}.{name}", one
        yield f"{root}.{name}.lora_B", b, f"{root}.{name}", one


def _new_config(
    adapter: Checkpoint,
    config: Mapping[str, Value],
    stated: Mapping[str, _Projection],
    others: Mapping[str, object],
    layout: ExpertLayout,
) -> dict[str, Value]:
    """The adapter's configuration with the modules, parameters, ranks and scales of the new layout."""
    result = {**config, "target_parameters": sorted(stated) if layout == "peft" else None}
    targets = config.get("target_modules")
    if isinstance(targets, (list, tuple)):
        leaves = {module.rpartition(".")[2] for module in others}
        own = {key.rpartition(".")[2] for key in stated}
        if layout == "peft":  # PEFT refuses a module of which it updates parameters
            known = {*_PEFT_PARAMETERS, *(name for names in GATE_AND_UP for name in names), "w2"}
            result["target_modules"] = [name for name in targets if name in leaves or name not in known]
        else:
            result["target_modules"] = [*targets, *sorted(own - {str(name) for name in targets})]
    ranks: dict[str, float] = {key: one.rank for key, one in stated.items()}
    alphas = {key: one.alpha for key, one in stated.items()}
    for patterns, default, numbers in (("rank_pattern", "r", ranks), ("alpha_pattern", "lora_alpha", alphas)):
        own_numbers = {
            key: _whole(number)
            for key, number in numbers.items()
            if pattern_value(adapter, result, patterns, default, key) != number
        }
        table = result.get(patterns) or {}
        if own_numbers and isinstance(table, dict):
            result[patterns] = {**own_numbers, **{key: value for key, value in table.items() if key not in own_numbers}}
    return result


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
