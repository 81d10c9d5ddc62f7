"""Merge model-parallel ranks: tensor-parallel shards are joined by rule, pipeline stages have different parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.checkpoint import Group, Parameter
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.layout import Layout, Rule, merge
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.engines.deepspeed.optimizer_states import has_tensor_in
from ckpt_formats.engines.deepspeed.rank import RankState


def merge_rows(ranks: Sequence[RankState], tp: int, layout_at: Callable[[int], Layout]) -> list[dict[str, Parameter]]:
    """The merged parameters of each pipeline stage. `tp` consecutive ranks are one stage.

    `layout_at` gives the layout for the number of a stage's first rank.
    """
    stages = []
    for first in range(0, len(ranks), tp):
        row, layout = ranks[first : first + tp], layout_at(first)
        names = dict.fromkeys(name for rank in row for name in rank.parameters)
        stages.append({name: merge_ranks(name, parameter_on_ranks(name, row), layout) for name in names})
    return stages


def parameter_on_ranks(name: str, ranks: Sequence[RankState]) -> list[Parameter]:
    """One parameter on every tensor-parallel rank. Raises `CorruptError` if a rank lacks it."""
    for number, rank in enumerate(ranks):
        if name not in rank.parameters:
            raise CorruptError(f"tensor `{name}` is on some tensor-parallel ranks, but not on rank {number}")
    return [rank.parameters[name] for rank in ranks]


def merge_ranks(name: str, shards: Sequence[Parameter], layout: Layout) -> Parameter:
    """One parameter, merged from all tensor-parallel ranks of a stage. Raises `RulesError` or `CorruptError`."""
    first = shards[0]
    for rank, shard in enumerate(shards):
        if shard.role != first.role or shard.states.keys() != first.states.keys():
            raise CorruptError(f"tensor `{name}` has different states on tensor-parallel ranks {rank} and 0")
    if any(shard.values != first.values for shard in shards):
        raise CorruptError(
            f"`{name}`: tensor-parallel ranks disagree on {first.values}", hint="Files of several steps may be mixed."
        )
    scalar = {state for state, tensor in first.states.items() if tensor.shape == () and first.weight.shape != ()}
    rule = _rule(name, first, layout, len(shards))
    if rule is None:
        return first
    states: dict[str, Tensor] = {}
    for state in first.states:
        by_rank = [shard.states[state] for shard in shards]
        states[state] = merge(name, by_rank, Rule(".*", "replicated") if state in scalar else rule)
    return replace(first, states=states)


def merge_stages(stages: Sequence[Mapping[str, Parameter]]) -> tuple[dict[str, Parameter], list[str]]:
    """The parameters of all stages, and the names that several stages have.

    Those are tied modules; the parameter of the first stage is taken.
    """
    merged: dict[str, Parameter] = {}
    repeated: list[str] = []
    for stage in stages:
        for name, parameter in stage.items():
            if name in merged:
                repeated.append(name)
            else:
                merged[name] = parameter
    return merged, list(dict.fromkeys(repeated))


def merge_groups(ranks: Sequence[Sequence[Group]], where: Path) -> tuple[Group, ...]:
    """Merge groups of different ranks that have the same options; a group at the same position has priority.

    Groups without options, as in elastic checkpoints, are matched by position only. Raises `CorruptError` if
    a parameter is in two merged groups: then ranks disagree on its options.
    """
    merged: list[Group] = []
    for groups in ranks:
        taken: set[int] = set()  # groups of one rank are never merged, even with equal options
        for i, group in enumerate(groups):
            free = [n for n in (i, *range(len(merged))) if n < len(merged) and n not in taken]
            at = next((n for n in free if _can_merge(merged[n], group, n == i)), len(merged))
            taken.add(at)
            if at == len(merged):
                merged.append(group)
            else:
                names = dict.fromkeys((*merged[at].names, *group.names))
                merged[at] = Group(merged[at].options or group.options, tuple(names))
    seen: dict[str, Group] = {}
    for group in merged:
        for name in group.names:
            other = seen.setdefault(name, group)
            if other is not group:
                differing = sorted(k for k in {*other.options, *group.options} if not _same_option(other, group, k))
                raise CorruptError(
                    f"`{printable(name)}` is in two groups of the optimizer: model-parallel ranks disagree on "
                    f"{list_names(differing, printable)}",
                    where=where,
                    hint="Files of several steps or runs were mixed: copy all files of one step again.",
                )
    return tuple(merged)


def _can_merge(one: Group, other: Group, same_place: bool) -> bool:
    """Are the options of two groups the same? Tensors are not compared; a group without parameters may have none."""
    if not one.options or not other.options:
        return same_place
    return all(_same_option(one, other, key) for key in {*one.options, *other.options})


def _same_option(one: Group, other: Group, key: str) -> bool:
    a, b = one.options.get(key), other.options.get(key)
    return has_tensor_in(a) or has_tensor_in(b) or same(a, b)


def _rule(name: str, parameter: Parameter, layout: Layout, tp: int) -> Rule | None:
    if parameter.role == "buffer" and not any(rule.matches(name) for rule in layout.rules if rule.pattern != ".*"):
        # DeepSpeed has no rules for buffers: they are the same on every rank, which is checked.
        return Rule(".*", "replicated") if tp > 1 else None
    if tp == 1 and not any(rule.matches(name) for rule in layout.rules):
        return None
    rule = layout.rule(name)
    return None if tp == 1 and rule.how == "sharded" and rule.vocabulary is None else rule
