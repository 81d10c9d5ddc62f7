"""Read the legacy layout: a folder for each rank, with a state dict in the rank's local names and shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.legacy.files import LegacyFiles, RankFile, open_legacy
from ckpt_formats.engines.megatron.shared.arguments import decayed_norms, has_mtp, sizes_of
from ckpt_formats.engines.megatron.shared.distributed_optimizer import (
    buckets_of,
    buffers_of,
    is_no_buffer,
    is_tied,
    read_buffers,
)
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE, collect_extras, label, optimizer_items
from ckpt_formats.engines.megatron.shared.merge import LocalCopy, merge_copies, merge_shards, require_copies
from ckpt_formats.engines.megatron.shared.model_chunk import ModelChunk, chunk_of
from ckpt_formats.engines.megatron.shared.names import HEAD, TIED, WORD_TABLE, Naming, is_expert
from ckpt_formats.engines.megatron.shared.optimizer_states import (
    OptimizerGroup,
    OptimizerStates,
    members,
    options_of,
    without_states,
)
from ckpt_formats.engines.megatron.shared.origin import origin_of
from ckpt_formats.engines.megatron.shared.plain_optimizer import read_plain
from ckpt_formats.engines.megatron.shared.rules import rules_for, with_stored_sizes
from ckpt_formats.engines.megatron.shared.stages import Stages
from ckpt_formats.state_dicts.statements import Statement, check_agreement


@dataclass(frozen=True)
class RankState:
    """The parameters, groups and extra states of one rank, under the names of the full model."""

    file: RankFile
    copies: Mapping[str, LocalCopy]
    groups: Sequence[tuple[Mapping[str, Value], tuple[str, ...]]]
    extra_states: Mapping[str, Value]


def read_legacy(path: Path, folder: Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint of one iteration, without reading data. `path` is the run or iteration that the user names."""
    legacy = open_legacy(folder)
    chunks = {rank.name: [chunk_of(chunk) for chunk in rank.chunks()] for rank in legacy.ranks}
    sizes = sizes_of(legacy.args, legacy.first.root.get("checkpoint_version", 0))
    shapes = (
        (name, tensor.shape) for all_of in chunks.values() for one in all_of for name, tensor in one.tensors.items()
    )
    layout = Layout(rules_for(options.rules), with_stored_sizes(sizes, shapes, legacy.parallel.tp))
    stages = _stages(legacy, chunks)
    ranks = [_rank_state(legacy, rank, chunks[rank.name], stages) for rank in legacy.ranks]
    parameters, aliases = _parameters(legacy, ranks, layout)
    groups = _groups(ranks, aliases)
    _check_steps(ranks, folder)
    extras = collect_extras([(_label(rank.file, legacy), _items(rank)) for rank in ranks], parameters)
    return Checkpoint(
        path=path,
        origin=origin_of(legacy.args, legacy.parallel, stages, legacy.first.root, "torch"),
        parameters=parameters,
        groups=groups,
        extras=extras,
        aliases=aliases,
        files=tuple(legacy.shards()),
        seals=tuple(seal for file in legacy.files() for seal in file.seals()),
        notices=tuple(without_states(parameters, groups)),
        layout=layout,
    )


def _check_steps(ranks: Sequence[RankState], folder: Path) -> None:
    """Raise `CorruptError` if optimizers of two ranks are at different steps."""
    statements = (
        Statement("the optimizer's step", rank.file.name, _number(options.get("step")))
        for rank in ranks
        for options, names in rank.groups
        if names
    )
    check_agreement(statements, folder)


def _number(value: Value) -> Value:
    return value if isinstance(value, (int, float)) else None


def _stages(legacy: LegacyFiles, chunks: Mapping[str, Sequence[ModelChunk]]) -> Stages:
    """The number of layers of each chunk in the files. Raises `CorruptError` if the arguments state another total."""
    by_stage = [[chunk.layers for chunk in chunks[legacy.of_stage(pp)[0].name]] for pp in range(legacy.parallel.pp)]
    counts = tuple(stage[v] for v in range(len(by_stage[0])) for stage in by_stage)
    stated = legacy.args.optional("num_layers", "encoder_num_layers")
    if stated is not None and stated != sum(counts):
        raise CorruptError(
            f"the files have {sum(counts)} layers, but the arguments state {stated}",
            where=legacy.path,
            hint="Files of several runs may be mixed.",
        )
    return Stages(counts, legacy.parallel.pp)


def _rank_state(legacy: LegacyFiles, file: RankFile, chunks: Sequence[ModelChunk], stages: Stages) -> RankState:
    optimized = _optimized(legacy, file, chunks)
    experts = legacy.args.number("num_experts", default=0) // legacy.parallel.ep
    copies: dict[str, LocalCopy] = {}
    extra: dict[str, Value] = {}
    titles: dict[tuple[int, str], list[str]] = {}
    for number, chunk in enumerate(chunks):
        naming = Naming(stages.layers(file.pp, number).start, file.ep * experts, experts)
        for local, local_tensor in chunk.tensors.items():
            key = (number, local)
            states = {MODEL: local_tensor, **optimized.states.get(key, {})}
            for state, tensor in states.items():
                for name, part in naming.tensors(local, tensor, is_weight=state == MODEL):
                    copy = copies.setdefault(name, LocalCopy({}, dict(optimized.values.get(key, {}))))
                    if copy.states.setdefault(state, part) is not part:
                        raise CorruptError(f"the rank has `{name}` twice", where=file.model.path)
                    titles.setdefault(key, []).append(name)
        extra |= {naming.plain(name): value for name, value in chunk.extra_states.items()}
    groups = [(g.options, tuple(dict.fromkeys(n for key in g.keys for n in titles[key]))) for g in optimized.groups]
    return RankState(file, copies, groups, extra)


def _optimized(legacy: LegacyFiles, file: RankFile, chunks: Sequence[ModelChunk]) -> OptimizerStates:
    """The optimizer states of a rank's parameters: empty if no optimizer was saved."""
    saved = file.root.get("optimizer")
    if saved is None:
        return OptimizerStates()
    is_list = isinstance(saved, (list, tuple))
    buffered = None if file.optimizer is None else file.optimizer.root
    parts = saved if is_list else [saved]
    flat = (buffered if is_list else [buffered]) if buffered is not None else [None] * len(parts)
    optimizer = OptimizerStates()
    if len(parts) > 2 or len(flat) != len(parts):
        raise CorruptError(f"there are {len(parts)} optimizers, but {len(flat)} sets of buffers", where=file.model.path)
    for experts, part, buffers in zip((False, True) if is_list else (None,), parts, flat, strict=True):
        if file.optimizer is None:
            one_optimizer = read_plain(part, chunks, experts, file.model.path, decayed_norms(legacy.args))
        else:
            one_optimizer = _distributed(legacy, file, chunks, experts, part, buffers)
        optimizer.states |= one_optimizer.states
        optimizer.values |= one_optimizer.values
        optimizer.groups += one_optimizer.groups
    return optimizer


def _distributed(
    legacy: LegacyFiles, file: RankFile, chunks: Sequence[ModelChunk], experts: bool | None, saved: Value, flat: Value
) -> OptimizerStates:
    assert file.optimizer is not None
    dp = legacy.parallel.expert_dp if experts else legacy.parallel.dp
    buckets = buckets_of(legacy.args, legacy.parallel, file.pp, dp, sum(chunk.numel for chunk in chunks))
    optimizer = OptimizerStates()
    if flat is not None:
        buffers = buffers_of(chunks, buckets.shared, experts)
        optimizer.states = read_buffers(flat, buffers, buckets, file.optimizer.path)
    listed = saved["optimizer"]["param_groups"]
    named = [((i, n), chunk.tensors[n].shape) for i, chunk in enumerate(chunks) for n in chunk.trained(experts=experts)]
    for group, keys in zip(
        listed, members(listed, named, experts, file.model.path, decayed_norms(legacy.args)), strict=True
    ):
        options = options_of(group, file.model.path)
        # Megatron stores the step in the group: it applies to each parameter.
        optimizer.groups.append(OptimizerGroup(options, tuple(keys)))
        for key in keys:
            if key in optimizer.states:
                optimizer.add_step(key, options.get("step"))
    return optimizer


def _parameters(
    legacy: LegacyFiles, ranks: Sequence[RankState], layout: Layout
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """All full parameters, and the other names of tied ones (alias, name)."""
    parallel = legacy.parallel
    parameters: dict[str, Parameter] = {}
    aliases: dict[str, str] = {}
    copied: dict[str, Parameter] = {}
    for pp in range(parallel.pp):
        stage = [rank for rank in ranks if rank.file.pp == pp]
        shards: dict[str, dict[int, list[tuple[str, Mapping[str, LocalCopy]]]]] = {}
        for rank in stage:
            for name in rank.copies:
                place = rank.file.etp if is_expert(name) else rank.file.tp
                shards.setdefault(name, {}).setdefault(place, []).append((rank.file.name, rank.copies))
        for name, by_rank in shards.items():
            degree = parallel.etp if is_expert(name) else parallel.tp
            _check_all(name, by_rank, degree, stage)
            parameter = merge_shards(
                name, [merge_copies(name, require_copies(name, by_rank[r])) for r in range(degree)], layout
            )
            if name in TIED and is_tied(legacy.args):
                copied[name] = parameter
            elif name == WORD_TABLE and name in parameters and has_mtp(legacy.args):
                parameters[name] = _with_copy(parameters[name], parameter)  # that of multi-token prediction
            elif name in parameters:
                raise CorruptError(f"`{name}` is on several pipeline stages", where=legacy.path)
            else:
                parameters[name] = parameter
    for name, parameter in copied.items():
        table = parameters.get(TIED[name])
        if table is None:
            parameters[name] = parameter
        else:
            aliases[name] = TIED[name]
            parameters[TIED[name]] = _with_copy(table, parameter)
    if is_tied(legacy.args) and WORD_TABLE in parameters and HEAD not in parameters:
        aliases[HEAD] = WORD_TABLE  # the output layer uses the table even if no stage has a copy
    return parameters, aliases


def _with_copy(table: Parameter, copy: Parameter) -> Parameter:
    """A shared table with the last stage's copy as a replica, to be compared."""
    states = {
        state: replace(tensor, replicas=(*tensor.replicas, copy.states[state], *copy.states[state].replicas))
        if state in copy.states and copy.states[state].shape == tensor.shape
        else tensor
        for state, tensor in table.states.items()
    }
    return replace(table, states=states)


def _check_all(name: str, by_rank: Mapping[int, object], degree: int, stage: Sequence[RankState]) -> None:
    lacking = sorted(set(range(degree)) - by_rank.keys())
    if lacking:
        names = ", ".join(rank.file.name for rank in stage)
        raise CorruptError(
            f"tensor `{name}` is missing on rank {lacking[0]} of the {degree} that split it (stage: {names})"
        )


def _groups(ranks: Sequence[RankState], aliases: Mapping[str, str]) -> tuple[Group, ...]:
    """The groups of all ranks. Groups with equal options are one group, even if their numbers differ.

    Raises `CorruptError` if a parameter has different options on two ranks.
    """
    merged: list[tuple[dict[str, Value], dict[str, None]]] = []
    for rank in ranks:
        for options, names in rank.groups:
            own_options = {key: value for key, value in options.items() if key != "step"}
            members = next((group_names for known, group_names in merged if known == own_options), None)
            if members is None:
                members = {}
                merged.append((own_options, members))
            members |= dict.fromkeys(name for name in names if name not in aliases)
    seen: dict[str, dict[str, Value]] = {}
    for options, group_names in merged:
        for name in group_names:
            other = seen.setdefault(name, options)
            if other is not options:
                odd = next(key for key in {**other, **options} if other.get(key) != options.get(key))
                raise CorruptError(
                    f"ranks with `{name}` disagree on its option `{odd}`: {other.get(odd)} and {options.get(odd)}",
                    hint="Files of several iterations or runs were mixed: copy all files of one iteration again.",
                )
    return tuple(Group(options, tuple(group_names)) for options, group_names in merged)


def _label(file: RankFile, legacy: LegacyFiles) -> str:
    return label(file.tp, file.pp, file.ep if legacy.parallel.ep > 1 else None)


def _items(rank: RankState) -> dict[str, Value]:
    root = rank.file.root
    read_keys = (
        "optimizer",
        *(("model",) if "model" in root else (f"model{i}" for i in range(len(rank.file.chunks())))),
    )
    items: dict[str, Value] = {str(k): v for k, v in root.items() if k not in read_keys}
    buffers = None if rank.file.optimizer is None else rank.file.optimizer.root
    if isinstance(buffers, dict) and (other_entries := {k: v for k, v in buffers.items() if is_no_buffer(k)}):
        items["distrib_optim"] = other_entries
    if rank.extra_states:
        items[EXTRA_STATE] = dict(rank.extra_states)
    if optimizer_extras := optimizer_items(root.get("optimizer")):
        items["optimizer"] = optimizer_extras
    return items
