"""Compare two checkpoints: choose their parameters, pair the tensors, find what differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.compare.pairs import compare_each, nbytes_of, pair_with_each
from ckpt.compare.result import Diff, TensorDiff
from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import Resources, check_complete
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint, Group, Parameter
from ckpt_formats.core.errors import NoMatchError
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.quantised.weights import may_have_quantised_states, quantised_weights
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.text import printable
from ckpt_formats.registry.encoded import uses_codecs


@dataclass(frozen=True)
class Selection:
    """Parameters whose names match one of `keep` (all, if empty) and none of `drop`.

    Patterns are regular expressions that match anywhere in a name.
    """

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    extras: bool = True
    """Compare tensors among the extras too, whatever their names."""

    def takes(self, name: str, role: str) -> bool:
        if role == "extra":
            return self.extras
        is_chosen = not self.keep or any(search(pattern, name) for pattern in self.keep)
        return is_chosen and not any(search(pattern, name) for pattern in self.drop)


@checked
def diff(
    first: Checkpoint,
    second: Checkpoint,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    states: Sequence[str] = (),
    *,
    tensors_only: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Diff:
    """Everything that differs between two checkpoints, whatever their formats and layouts. Reads each byte once.

    `only` and `skip` are patterns of names, `states` names of states (`model`, `master`, `exp_avg`, ...). With
    `tensors_only`, extras, counters and the optimizer's options are left out. Raises `NoMatchError` for a pattern that
    matches nothing, `IncompleteError` or `CorruptError` if a checkpoint is incomplete or damaged.
    """
    a, b = select_both(first, second, Selection(tuple(only), tuple(skip), extras=not tensors_only))
    return diff_selected(a, b, states, tensors_only, resources or Resources.of_machine(), progress)


@checked
def diff_each(
    first: Checkpoint,
    others: Sequence[Checkpoint],
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    states: Sequence[str] = (),
    *,
    tensors_only: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> list[Diff]:
    """Everything by which each of several checkpoints differs from the first, which is read only once.

    The arguments and errors are those of `diff`.
    """
    choice = Selection(tuple(only), tuple(skip), extras=not tensors_only)
    baseline, *rest = select_each((first, *others), choice)
    return each_selected(baseline, rest, states, tensors_only, resources or Resources.of_machine(), progress)


def diff_selected(
    first: Checkpoint,
    second: Checkpoint,
    states: Sequence[str],
    tensors_only: bool,
    resources: Resources,
    progress: AnyProgress | None,
    figures: bool = True,
) -> Diff:
    """Everything that differs between two checkpoints that `select_both` returned.

    Without `figures`, of tensors whose bits are all equal only the elements are counted.
    """
    return each_selected(first, [second], states, tensors_only, resources, progress, figures)[0]


def each_selected(
    first: Checkpoint,
    others: Sequence[Checkpoint],
    states: Sequence[str],
    tensors_only: bool,
    resources: Resources,
    progress: AnyProgress | None,
    figures: bool = True,
) -> list[Diff]:
    """Everything by which each of several checkpoints that `select_each` returned differs from the first.

    The first is read once for all others that store values as it does: those of quantised weights once more.
    """
    for checkpoint in (first, *others):
        check_complete(checkpoint)
    plain = [_by_value(first, other) for other in others]
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(plain):
        groups.setdefault(id(one.first), []).append(number)
    paired = [
        pair_with_each(plain[numbers[0]].first, [plain[number].second for number in numbers], states)
        for numbers in groups.values()
    ]
    if any(map(uses_codecs, (first, *others))):
        load_kernels()
    count = count_to(sum(nbytes_of(every) for every in paired), progress)
    by_number: dict[int, Diff] = {}
    for numbers, every in zip(groups.values(), paired, strict=True):
        by_number |= zip(numbers, compare_each(every, resources, count, tensors_only, figures), strict=True)
    for checkpoint in (first, *others):
        check_unchanged(checkpoint.identities)
    return [plain[number].named(by_number[number]) for number in range(len(others))]


@dataclass(frozen=True, eq=False)
class _ByValue:
    """Two checkpoints, with plain values where the two quantise weights or states in different ways."""

    first: Checkpoint
    second: Checkpoint
    weights: Mapping[str, str]
    """The scheme of each weight that was dequantised."""
    states: Mapping[tuple[str, str], str]
    """The scheme of each state that was dequantised."""

    def named(self, result: Diff) -> Diff:
        """The result, in which pairs say that their values were dequantised."""
        if not (self.weights or self.states):
            return result
        schemes = {p: self.states.get((p.name, p.state)) or self.weights.get(p.name) for p in result.pairs}
        named = (pair if scheme is None else _with_scheme(pair, scheme) for pair, scheme in schemes.items())
        return replace(result, pairs=tuple(named))


def _by_value(first: Checkpoint, second: Checkpoint) -> _ByValue:
    weights: dict[str, str] = {}
    states: dict[tuple[str, str], str] = {}
    if quantised_weights(first) or quantised_weights(second):
        from ckpt_formats.core.quantised.plain import plain_where_they_differ  # other models need no codecs

        first, second, weights = plain_where_they_differ(first, second)
    if may_have_quantised_states(first) or may_have_quantised_states(second):
        from ckpt_formats.core.quantised.states import quantised_states, with_plain_states  # others need no codecs

        by_side = [quantised_states(one) for one in (first, second)]
        first, second = (with_plain_states(one, own) for one, own in zip((first, second), by_side, strict=True))
        states = {(one.parameter, one.name): one.scheme for own in by_side for one in own if one.tensor is not None}
    return _ByValue(first, second, weights, states)


def _with_scheme(pair: TensorDiff, scheme: str) -> TensorDiff:
    """The pair, which says that its values were dequantised."""
    return replace(pair, what=f"{pair.what}, dequantised from {scheme}".removeprefix(", "))


def select_both(first: Checkpoint, second: Checkpoint, choice: Selection) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints with the parameters that are chosen.

    Raises `NoMatchError` for a pattern that matches in neither.
    """
    a, b = select_each((first, second), choice)
    return a, b


def select_each(checkpoints: Sequence[Checkpoint], choice: Selection) -> list[Checkpoint]:
    """The checkpoints with the parameters that are chosen. Raises `NoMatchError` for a pattern that matches in none."""
    names = set[str]().union(*((*one.parameters, *one.aliases) for one in checkpoints))
    for pattern in (*choice.keep, *choice.drop):
        safe_pattern(pattern, "only or skip (--only, --skip)")
        if not any(search(pattern, name) for name in names):
            raise NoMatchError(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
    return [_chosen(one, choice) for one in checkpoints]


def _chosen(source: Checkpoint, choice: Selection) -> Checkpoint:
    """The chosen parameters. Of tied names, the first chosen one has the values, whichever has them in the source."""
    if isinstance(source.parameters, TabulatedParameters) and choice == Selection():
        return source  # all of it; its names are those that there are
    parameters: dict[str, Parameter] = {}
    aliases: dict[str, str] = {}
    holders: dict[str, str] = {}
    for name, owner in {**{name: name for name in source.parameters}, **source.aliases}.items():
        parameter = source.parameters.get(owner)
        if not choice.takes(name, parameter.role if parameter else "parameter"):
            continue
        if parameter is not None and owner not in holders:
            holders[owner] = name
            parameters[name] = replace(parameter, name=name)
        else:
            aliases[name] = holders.get(owner, owner)
    return replace(
        source,
        parameters=parameters,
        aliases=aliases,
        groups=tuple(Group(g.options, tuple(holders[n] for n in g.names if n in holders)) for g in source.groups),
        errors={(holders[name], state): loss for (name, state), loss in source.errors.items() if name in holders},
    )
