"""The merge of an adapter into the weights of experts, wherever the model stores them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.combine.adapter import MODEL_TYPES, refusal
from ckpt.combine.experts import (
    ExpertAxes,
    ExpertModule,
    ExpertTarget,
    ExpertUpdate,
    ExpertWeights,
    LowRank,
    StoredExperts,
    Updates,
    fits,
    of_each_expert,
    with_projections,
)
from ckpt.combine.lora_blob import merged_blob
from ckpt.combine.lora_merge import LoraMerge
from ckpt.combine.sources import CONFIG
from ckpt_formats.core.computed_blobs import ComputedBlob
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import (
    LayersBlob,
    concatenated,
    group_rows,
    interleaved,
    rows_of,
    transposed,
    unstacked_all,
)

_IN_TURN = frozenset(["gpt_oss"])
"""Types of models whose stacks have the rows of gate and up in turn. In those of all others they are two halves."""


@dataclass
class _WeightEdit:
    """The updates of one projection of the model."""

    is_transposed: bool
    """Whether the weight is stored as (in, out)."""
    parts: dict[int | None, dict[int, LowRank]] = field(default_factory=dict)
    """By part, 0 for gate and 1 for up or None for all of the weight, and by expert."""


def merged_experts(merge: LoraMerge, modules: Mapping[str, ExpertModule], axes: ExpertAxes | None) -> dict[str, Tensor]:
    """Weights of experts with their updates, by the model's names.

    axes: how stacks of square weights are stored, if nothing else tells. Raises `UnsupportedError` if it is needed, and
    for what does not fit.
    """
    stored, result = StoredExperts(merge.base), dict[str, Tensor]()
    for own_root, module in modules.items():
        root = merge.prefix(own_root)
        updates = with_projections(merge.adapter, module, own_root, root, stored)
        for weights, edit in _edits(merge, updates, root, stored, axes).items():
            result |= _updated(merge, weights, edit)
    return result


def _edits(
    merge: LoraMerge, updates: Updates, root: str, stored: StoredExperts, axes: ExpertAxes | None
) -> dict[ExpertWeights, _WeightEdit]:
    """The edits of all weights of a module. Raises `UnsupportedError` for an update that fits none, or in two ways."""
    changes = list[tuple[ExpertTarget, frozenset[bool], Mapping[int | None, ExpertUpdate | LowRank]]]()
    for projection, update in updates.items():
        targets = stored.targets(root, projection)
        for one in update.values():
            readings = fits(targets, one.b.shape[-2], one.a.shape[-1])
            if not readings:
                raise _misfit(merge, one, targets)
            # Older versions of PEFT read every stack in memory as (experts, in, out).
            if isinstance(one, ExpertUpdate) and one.flattened and one.b.shape[0] == one.a.shape[1]:
                readings = frozenset({False, True})
            changes += [(target, readings, update) for target in targets]
    known = {reading for _, readings, _ in changes for reading in readings if len(readings) == 1}
    result = dict[ExpertWeights, _WeightEdit]()
    for target, readings, own in changes:
        is_transposed = _reading(merge, target, readings if len(readings) == 1 else frozenset(known), axes)
        if is_transposed and target.update_part is not None:
            raise refusal(
                merge.adapter, f"`{printable(root)}`: an update of (in, out) cannot be split into gate and up"
            )
        edit = result.setdefault(target.weights, _WeightEdit(is_transposed))
        experts = dict(of_each_expert(own, target.weights.count, merge.adapter))
        if target.update_part is not None:
            experts = {expert: _half(one, target.update_part) for expert, one in experts.items()}
        edit.parts[target.weight_part] = experts
    for weights, edit in result.items():
        if None in edit.parts and len(edit.parts) > 1:
            raise refusal(merge.adapter, f"two tensors of the adapter are meant for `{printable(weights.names[0])}`")
    return result


def _half(update: LowRank, part: int) -> LowRank:
    """The update of gate (0) or up (1), of one that has both."""
    rows = update.b.shape[0] // 2
    return update.outputs(part * rows, (part + 1) * rows)


def _reading(merge: LoraMerge, target: ExpertTarget, readings: frozenset[bool], axes: ExpertAxes | None) -> bool:
    """Whether weights are stored as (in, out): as their shape shows, that of others in the module, or `axes` states."""
    if len(readings) == 1:
        return next(iter(readings))
    if axes is not None:
        return axes == "in-out"
    raise UnsupportedError(
        f"the experts of `{printable(target.weights.names[0])}` are square: whether they are stored as (in, out) or "
        "(out, in) is unknown",
        where=merge.adapter.path,
        hint="State it: --expert-axes in-out, as GPT-OSS and Llama 4 store them, or --expert-axes out-in.",
    )


def _misfit(merge: LoraMerge, update: ExpertUpdate | LowRank, targets: tuple[ExpertTarget, ...]) -> UnsupportedError:
    shapes = ", ".join(f"{list(target.weights.shape)} in `{target.weights.names[0]}`" for target in targets)
    error = refusal(
        merge.adapter,
        f"an update of {list(update.b.shape)} times {list(update.a.shape)} of `{printable(update.module)}` fits no "
        f"weights of the model{': experts have ' + printable(shapes) if shapes else ''}",
        "Is this the model that the adapter was trained for?",
    )
    assert isinstance(error, UnsupportedError)
    return error


def _updated(merge: LoraMerge, weights: ExpertWeights, edit: _WeightEdit) -> dict[str, Tensor]:
    for name in weights.names:
        weight = merge.base.parameters[name].weight
        if weight.dtype.name not in MODEL_TYPES:
            message = (
                f"`{printable(name)}` of the model holds {weight.dtype.name} values, to which nothing can be added"
            )
            raise refusal(merge.adapter, message, "Merge the adapter into the model before its weights are quantized.")
    if not weights.is_stack:
        experts = sorted({expert for one in edit.parts.values() for expert in one})
        names = [(expert, weights.names[expert]) for expert in experts]
        merged = {name: _merged(merge, weights, edit, i, merge.base.parameters[name].weight) for i, name in names}
        return {name: Tensor.of(ComputedBlob(tensor, name)) for name, tensor in merged.items()}
    (name,) = weights.names
    tensors: dict[Shape, Tensor] = {
        (i,): _merged(merge, weights, edit, i, weight)
        for i, weight in enumerate(unstacked_all(merge.base.parameters[name].weight))
    }
    return {name: Tensor.of(ComputedBlob(Tensor.of(LayersBlob((weights.count,), tensors)), name))}


def _merged(merge: LoraMerge, weights: ExpertWeights, edit: _WeightEdit, expert: int, weight: Tensor) -> Tensor:
    """The weight of one expert with its updates."""
    own = {part: updates[expert] for part, updates in edit.parts.items() if expert in updates}
    if not own:
        return weight
    if None in own:
        return _with_update(merge, weight, own[None], edit.is_transposed)
    matrix = transposed(weight) if edit.is_transposed else weight
    rows = matrix.shape[0] // 2
    in_turn = _is_in_turn(merge, weights)
    parts = [
        group_rows(matrix, rows, i, i + 1) if in_turn else rows_of(matrix, [(i * rows, (i + 1) * rows)])
        for i in range(2)
    ]
    merged = [_with_update(merge, one, own[i], False) if i in own else one for i, one in enumerate(parts)]
    joined = interleaved(merged, rows) if in_turn else concatenated(merged)
    return transposed(joined) if edit.is_transposed else joined


def _with_update(merge: LoraMerge, weight: Tensor, update: LowRank, is_transposed: bool) -> Tensor:
    scale = merge.module_scale(update.module, update.a.shape[0])
    if update.b.shape[1] != update.a.shape[0]:
        raise refusal(
            merge.adapter,
            f"`{printable(update.module)}` has an update of {list(update.b.shape)} times {list(update.a.shape)}",
        )
    return Tensor.of(merged_blob(weight, update.a, update.b, scale, is_transposed))


def _is_in_turn(merge: LoraMerge, weights: ExpertWeights) -> bool:
    """Whether a stack of gate and up has their rows in turn, as the model's type tells."""
    config = merge.base.extras.get(CONFIG)
    types = set[str]()
    for table in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(table, dict) and isinstance(table.get("model_type"), str):
            types.add(table["model_type"])
    if not types:
        raise refusal(
            merge.adapter,
            f"whether `{printable(weights.names[0])}` has the rows of gate and up in turn or as two halves is unknown: "
            "the model has no config.json that states its type",
            "Give the folder of the model, with its config.json.",
        )
    return bool(types & _IN_TURN)
