"""Compare two checkpoints: choose their parameters, pair the tensors, find what differs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt.compare.pairs import compare, pair_tensors
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
    for checkpoint in (first, second):
        check_complete(checkpoint)
    dequantised: dict[str, str] = {}
    if quantised_weights(first) or quantised_weights(second):
        from ckpt_formats.core.quantised.plain import plain_where_they_differ  # other models need no codecs

        first, second, dequantised = plain_where_they_differ(first, second)
    of_states: dict[tuple[str, str], str] = {}
    if may_have_quantised_states(first) or may_have_quantised_states(second):
        from ckpt_formats.core.quantised.states import quantised_states, with_plain_states  # others need no codecs

        by_side = [quantised_states(one) for one in (first, second)]
        first, second = (with_plain_states(one, own) for one, own in zip((first, second), by_side, strict=True))
        of_states = {(one.parameter, one.name): one.scheme for own in by_side for one in own if one.tensor is not None}
    pairs = pair_tensors(first, second, states)
    if uses_codecs(first) or uses_codecs(second):
        load_kernels()
    result = compare(pairs, resources, count_to(pairs.nbytes, progress), tensors_only, figures)
    for checkpoint in (first, second):
        check_unchanged(checkpoint.identities)
    if dequantised or of_states:
        schemes = {pair: of_states.get((pair.name, pair.state)) or dequantised.get(pair.name) for pair in result.pairs}
        named = (pair if scheme is None else _with_scheme(pair, scheme) for pair, scheme in schemes.items())
        result = replace(result, pairs=tuple(named))
    return result


def _with_scheme(pair: TensorDiff, scheme: str) -> TensorDiff:
    """The pair, which says that its values were dequantised."""
    return replace(pair, what=f"{pair.what}, dequantised from {scheme}".removeprefix(", "))


def select_both(first: Checkpoint, second: Checkpoint, choice: Selection) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints with the parameters that are chosen.

    Raises `NoMatchError` for a pattern that matches in neither.
    """
    names = first.parameters.keys() | first.aliases.keys() | second.parameters.keys() | second.aliases.keys()
    for pattern in (*choice.keep, *choice.drop):
        safe_pattern(pattern, "only or skip (--only, --skip)")
        if not any(search(pattern, name) for name in names):
            raise NoMatchError(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
    return _chosen(first, choice), _chosen(second, choice)


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
