"""Merge the ranks' parameters: copies of a shard become replicas, and shards are joined by the layout's rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_formats.core.checkpoint import MODEL, Parameter, Role
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.layout import Layout, Rule, merge
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.names import is_buffer


@dataclass
class LocalCopy:
    """The states and values of one parameter on one rank, in its local shape."""

    states: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)


def merge_copies(name: str, copies: Sequence[LocalCopy]) -> LocalCopy:
    """The same shard from several ranks as one, with replicas. Some ranks may not save its optimizer states.

    Raises `CorruptError` if the copies have different shapes or values.
    """
    states: dict[str, list[Tensor]] = {}
    values: dict[str, Value] = {}
    for copy in copies:
        for state, tensor in copy.states.items():
            states.setdefault(state, []).append(tensor)
        for key, value in copy.values.items():
            if values.setdefault(key, value) != value:
                raise CorruptError(f"ranks disagree on `{key}` of `{name}`: {values[key]} and {value}", hint=_MIXED)
    return LocalCopy({state: _same(name, state, tensors) for state, tensors in states.items()}, values)


def merge_shards(name: str, shards: Sequence[LocalCopy], layout: Layout) -> Parameter:
    """The full parameter from its shards, in the order of ranks. Raises `RulesError` or `CorruptError`."""
    first = shards[0]
    for rank, shard in enumerate(shards):
        if shard.states.keys() != first.states.keys():
            raise CorruptError(f"tensor `{name}` has other states in shard {rank} than in shard 0", hint=_MIXED)
        if shard.values != first.values:
            raise CorruptError(f"`{name}`: ranks disagree on {first.values} and {shard.values}", hint=_MIXED)
    scalars = {state for state, tensor in first.states.items() if tensor.shape == () and state != MODEL}
    rule = None if len(shards) == 1 and not layout.matching(name) else layout.rule(name)
    states = {
        state: merge_state(name, [shard.states[state] for shard in shards], None if state in scalars else rule)
        for state in first.states
    }
    role: Role = "buffer" if is_buffer(name) else "parameter"
    return Parameter(name, role, states, first.values)


def merge_state(name: str, shards: Sequence[Tensor], rule: Rule | None) -> Tensor:
    """One full state from its shards. Without a rule, each rank has the full state."""
    return merge(name, shards, rule or Rule(".*", "replicated"))


def require_copies(name: str, ranks: Iterable[tuple[str, Mapping[str, LocalCopy]]]) -> list[LocalCopy]:
    """The copy of a parameter on each rank, given as (name of the rank, its parameters).

    Raises `CorruptError` if a rank does not have the parameter.
    """
    copies = []
    for rank, parameters in ranks:
        if name not in parameters:
            raise CorruptError(f"tensor `{name}` is on other ranks of the stage, but not in {rank}", hint=_MIXED)
        copies.append(parameters[name])
    return copies


_MIXED = "Files of several iterations or runs were mixed: copy all files of one iteration again."


def _same(name: str, state: str, tensors: Sequence[Tensor]) -> Tensor:
    if any((tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype) for tensor in tensors):
        raise CorruptError(
            f"copies of `{name}` ({state}) have the shapes {[list(tensor.shape) for tensor in tensors]}", hint=_MIXED
        )
    return with_replicas(tensors) if len(tensors) > 1 else tensors[0]
