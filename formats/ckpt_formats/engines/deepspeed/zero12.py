"""Read ZeRO stages 1 and 2, and `BF16_Optimizer`: each group is flattened, then split over the ranks.

The order within a group is that of `param_shapes`, also with `round_robin_gradients`.
DeepSpeed's own tools use `param_slice_mappings`, which then has another order, and
their result is wrong without an error.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.checkpoint import MASTER, Group
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.flat_partitions import FlatPiece, tensor_in
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import FileBlob, Tensor, with_replicas
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.deepspeed.experts import ExpertNames, expert_ranks
from ckpt_formats.engines.deepspeed.flat_partitions import parameter_offsets, undo_round_robin
from ckpt_formats.engines.deepspeed.lookups import get, is_tensor, shape_of, vector
from ckpt_formats.engines.deepspeed.optimizer_states import (
    ELEMENTWISE,
    OptimizerStates,
    check_count,
    check_options,
    options_of,
    split_state,
)
from ckpt_formats.state_dicts.statements import MIXED

Shapes = Mapping[str, Shape]


def read_groups(groups: Sequence[Shapes], optims: Sequence[TorchFile], config: Mapping[str, Value]) -> OptimizerStates:
    """The optimizer states of one model-parallel rank, from the files of its data-parallel ranks in order.

    `groups` are the shapes of each group's parameters, in the order of the flat buffer.
    Raises `CorruptError` if the files contradict each other or the shapes.
    """
    optimizer = OptimizerStates()
    zero = config.get("zero_optimization")
    contiguous = bool(config.get("use_data_before_expert_parallelism"))
    roots = [get(file.root, "optimizer_state_dict", dict, file.path) for file in optims]
    # `BF16_Optimizer`, whose files state no stage, ignores this option and `parameter_alignment`.
    round_robin = isinstance(zero, dict) and bool(zero.get("round_robin_gradients")) and "zero_stage" in roots[0]
    for root, file in zip(roots, optims, strict=True):
        _check_groups(root, file, len(groups))
    for g, shapes in enumerate(groups):
        count = _count(roots, optims, g)
        names: list[str] = []
        for expert_rank in range(len(optims) // count):
            ranks = expert_ranks(expert_rank, count, len(optims), contiguous)
            rename = ExpertNames(shapes, expert_rank) if count < len(optims) else None
            renamed = {rename(name) if rename else name: shape for name, shape in shapes.items()}
            _read_group(optimizer, g, renamed, [roots[r] for r in ranks], [optims[r] for r in ranks])
            names += undo_round_robin(list(renamed), count) if round_robin else renamed
        check_options([_options(root, g, file.path) for root, file in zip(roots, optims, strict=True)], optims, g)
        optimizer.groups.append(Group(_options(roots[0], g, optims[0].path), tuple(names)))
    _check_names(groups, roots, optims)
    return optimizer


def stated_shapes(model: TorchFile) -> list[Shapes]:
    """`param_shapes` of a model file: the shapes of each group's parameters by name."""
    groups = get(model.root, "param_shapes", list, model.path)
    return [
        {str(name): shape_of(shape, model.path) for name, shape in get(groups, g, dict, model.path).items()}
        for g in range(len(groups))
    ]


def mapped_names(optims: Sequence[TorchFile]) -> list[list[str]]:
    """The names of each group in the order of the flat buffer, from `param_slice_mappings`.

    A pipeline at stage 0 states them nowhere else. (`round_robin_gradients`, with which the order of the mappings
    is wrong, exists only at stages 1 and 2.)
    """
    names: list[dict[str, None]] = []
    for file in optims:
        root = get(file.root, "optimizer_state_dict", dict, file.path)
        for g, mapping in enumerate(root.get("param_slice_mappings") or ()):
            if g == len(names):
                names.append({})
            names[g].update(dict.fromkeys(map(str, mapping)))
    return [list(group) for group in names]


def _check_names(groups: Sequence[Shapes], roots: Sequence[dict[Value, Value]], optims: Sequence[TorchFile]) -> None:
    """Raise `CorruptError` if the model file and the optimizer's files list different names. The order may differ."""
    if any(root.get("param_slice_mappings") is None for root in roots):
        return
    listed = mapped_names(optims)
    for g in range(max(len(groups), len(listed))):
        in_model, in_optimizer = (set(names[g]) if g < len(names) else set() for names in (groups, listed))
        if mismatched := sorted(
            name for name in in_model ^ in_optimizer if name not in in_model or 0 not in groups[g][name]
        ):
            has, lacks = ("model", "optimizer") if mismatched[0] in in_model else ("optimizer", "model")
            raise CorruptError(
                f"`{mismatched[0]}` is in group {g} in the {has}'s file, but not in the {lacks}'s file",
                where=optims[0].path,
                hint="Files of several runs may be mixed.",
            )


def _read_group(
    optimizer: OptimizerStates,
    g: int,
    shapes: Mapping[str, Shape],
    roots: Sequence[dict[Value, Value]],
    files: Sequence[TorchFile],
) -> None:
    masters = [
        vector(get(get(root, "single_partition_of_fp32_groups", list, file.path), g, object, file.path), file.path)
        for root, file in zip(roots, files, strict=True)
    ]
    offsets = parameter_offsets(shapes.values(), _paddings(roots[0], "param_alignment_paddings", g, files[0].path))
    length = max(master.shape[0] for master in masters)
    if sum(master.shape[0] for master in masters) == offsets[-1]:  # saved without padding, also by rank 0
        padding = _paddings(roots[0], "group_paddings", None, files[0].path) or [0] * (g + 1)
        length = max(length, masters[0].shape[0] + padding[g])
    if length * len(masters) < offsets[-1]:
        raise CorruptError(
            f"the partitions of group {g} have {length * len(masters)} elements, but its parameters {offsets[-1]}",
            where=files[0].path,
            hint="Files of several runs may be mixed.",
        )
    by_state = {MASTER: [FlatPiece(rank * length, master) for rank, master in enumerate(masters)]}
    state = split_state([_base(root, g, file.path) for root, file in zip(roots, files, strict=True)], files)
    complete: dict[str, dict[str, Tensor]] = {}
    for key, values in state.vectors.items():
        vectors = [vector(value, file.path) for value, file in zip(values, files, strict=True)]
        if all(_fits(v.shape[0], rank, length, offsets[-1]) for rank, v in enumerate(vectors)):
            by_state[key] = [FlatPiece(rank * length, v) for rank, v in enumerate(vectors)]
        elif (copies := _complete_per_rank(shapes, offsets, length, vectors)) is not None:
            complete[key] = copies
        elif key in ELEMENTWISE:
            raise CorruptError(
                f"the optimizer state `{key}` of group {g} has a length that fits no parameter", where=files[0].path
            )
        else:
            _add_unplaced(optimizer, g, key, values, files)
    step = roots[0].get("base_optimizer_state_step")  # elastic checkpoints store it here
    if step is not None and not is_tensor(step) and "step" not in state.scalars:
        state.values.setdefault("step", step)
    for (name, shape), offset in zip(shapes.items(), offsets, strict=False):
        optimizer.states[name] = {
            **{key: tensor_in(shape, parts[0].vector.dtype, offset, parts) for key, parts in by_state.items()},
            **{key: tensors[name] for key, tensors in complete.items()},
            **state.scalars,
        }
        optimizer.values[name] = dict(state.values)


def _fits(size: int, rank: int, length: int, end: int) -> bool:
    """Can `size` be the length of a rank's partition, with or without the padding at the end of the buffer?

    Partitions have `length` elements; the buffer ends at element `end`.
    """
    return size == length or (size < length and rank * length + size >= end)


def _add_unplaced(
    optimizer: OptimizerStates, g: int, key: str, values: Sequence[Value], files: Sequence[TorchFile]
) -> None:
    """Record a state whose shape is not that of the parameters, such as the error feedback of 1-bit Adam."""
    for value, file in zip(values, files, strict=True):
        optimizer.unplaced.setdefault(file.path, {})[f"{g}.{to_stored(key)}"] = value


def _complete_per_rank(
    shapes: Mapping[str, Shape], offsets: Sequence[int], length: int, vectors: Sequence[FileBlob]
) -> dict[str, Tensor] | None:
    """One state of all parameters, if each rank stores it complete for every parameter of which it has a part.

    Muon's momentum is such a state. None if the lengths of the vectors do not fit.
    """
    copies: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for rank, values in enumerate(vectors):
        at = 0
        for (name, shape), offset in zip(shapes.items(), offsets, strict=False):
            size = prod(shape)
            if size and offset < (rank + 1) * length and rank * length < offset + size:
                if at + size > values.shape[0]:
                    return None
                copies[name].append(Tensor.of(values.flat(at, at + size).shaped(shape)))
                at += size
        if at != values.shape[0]:
            return None
    return {name: with_replicas(c) if c else Tensor(shapes[name], vectors[0].dtype, ()) for name, c in copies.items()}


def _check_groups(root: dict[Value, Value], file: TorchFile, count: int) -> None:
    """Raise `CorruptError` if the optimizer has states of groups that the model's file does not list."""
    check_count("masters", len(get(root, "single_partition_of_fp32_groups", list, file.path)), count, file)
    base = get(root, "base_optimizer_state", object, file.path)
    if isinstance(base, list):
        check_count("states", len(base), count, file)
        return
    groups = base.get("param_groups") if isinstance(base, dict) else None
    if isinstance(groups, list):
        check_count("options", len(groups), count, file)
    states = get(base, "state", dict, file.path)
    unknown = next((key for key in states if key not in range(count)), None)
    if unknown is not None:
        raise CorruptError(
            f"the optimizer has a state of group {str(unknown)[:20]}, but `param_shapes` lists {count} groups",
            where=file.path,
            hint=MIXED,
        )


def _count(roots: Sequence[dict[Value, Value]], files: Sequence[TorchFile], g: int) -> int:
    """The number of ranks over which group `g` is split: all ranks, or those with the same experts."""
    counts = [get(get(r, "partition_count", list, f.path), g, int, f.path) for r, f in zip(roots, files, strict=True)]
    if any(count != counts[0] for count in counts) or not 0 < counts[0] <= len(files) or len(files) % counts[0]:
        other = next((f for f, c in zip(files, counts, strict=True) if c != counts[0]), files[0])
        raise CorruptError(
            f"the optimizer was split over {sorted(set(counts))} ranks, but files of {len(files)} are here",
            where=other.path,
            hint="Files are missing, or they are from runs on different numbers of GPUs.",
        )
    return counts[0]


def _base(root: dict[Value, Value], g: int, where: Path) -> dict[Value, Value]:
    """The base optimizer's state of a group. It is in a list with `elastic_checkpoint`, otherwise in a mapping."""
    base = get(root, "base_optimizer_state", object, where)
    if isinstance(base, list):
        return get(base, g, dict, where)
    states = get(base, "state", dict, where)
    return get(states, g, dict, where) if g in states else {}


def _options(root: dict[Value, Value], g: int, where: Path) -> dict[str, Value]:
    base = root.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return options_of(groups[g], where) if isinstance(groups, list) and g < len(groups) else {}


def _paddings(root: dict[Value, Value], key: str, g: int | None, where: Path) -> list[int] | None:
    listed = root.get(key)
    if not listed:
        return None
    paddings = listed if g is None else get(listed, g, list, where)
    if not isinstance(paddings, list) or not all(map(is_natural, paddings)):
        raise CorruptError(f"not a list of paddings: {str(paddings)[:60]}", where=where)
    return paddings
