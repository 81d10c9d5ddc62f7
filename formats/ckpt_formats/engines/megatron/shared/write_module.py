"""The state dict of one model chunk of a new layout: its tensors and its modules' extra states."""

import re
from collections.abc import Mapping, Sequence

from ckpt_formats.core.values import StdDict, Value
from ckpt_formats.engines.megatron.shared.distributed_optimizer import is_tied
from ckpt_formats.engines.megatron.shared.names import HEAD, expert_of, is_extra_state, layer_of
from ckpt_formats.engines.megatron.shared.split import LocalParameter, RankCoords, home, local_name
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.shared.write_names import expert_storage, grouped
from ckpt_formats.engines.megatron.shared.write_optimizer import computed_weight
from ckpt_formats.state_dicts.extras import tensors_for_names

_SUFFIX = "._extra_state"
_LINEAR = re.compile(
    r"(.*\.(?:eh_proj|linear_(?:proj|qkv|fc1|fc2|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)))\.weight"
)
_BEFORE_CORE = ("language_model", "word_embeddings_for_head", "lm_head", "binary_head")


def state_dict_of(
    target: WriteLayout,
    place: RankCoords,
    number: int,
    chunk: Sequence[LocalParameter],
    extra: Mapping[str, Value],
    *,
    plain: bool,
) -> StdDict:
    """The state dict of model chunk `number` of a rank.

    `extra` are the extra states of the full model. `plain` is true if there is a plain optimizer, which has no masters
    of float32 weights.
    """
    tensors = {parameter.local: computed_weight(parameter, plain=plain) for parameter in chunk}
    states = _own_states(target, place, number, extra)
    if target.source.origin.layout.get("container") != "torch":  # legacy files list all extra states
        states |= {name: None for name in _expected(target, place, number, tensors) if name not in states}
    return _nested({**_with_states(tensors, states)})


def _own_states(target: WriteLayout, place: RankCoords, number: int, extra: Mapping[str, Value]) -> dict[str, Value]:
    """The extra states of a chunk's modules, by local name."""
    layers = target.stages.layers(place.pp, number)
    own = range(place.ep * target.experts, (place.ep + 1) * target.experts)
    storage = expert_storage(target)
    states: dict[str, Value] = {}
    for name, value in extra.items():
        expert, layer = expert_of(name), layer_of(name)
        in_chunk = layer in layers if layer is not None else home(target, name) == (place.pp, number)
        if not in_chunk or (expert is not None and (expert not in own or storage == "joined")):
            continue
        local = local_name(name, layers.start, own.start)
        states.setdefault(
            _of_group(local) if storage == "grouped" else local, tensors_for_names(value, target.source.parameters)
        )
    return states


def _of_group(name: str) -> str:
    """The name of an extra state if experts are grouped: all experts of a projection are one module.

    >>> _of_group("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2._extra_state")
    'decoder.layers.0.mlp.experts.linear_fc2._extra_state'
    """
    return re.sub(rf"({re.escape(_SUFFIX)})\d+$", r"\1", grouped(name))


def _expected(target: WriteLayout, place: RankCoords, number: int, tensors: Mapping[str, Value]) -> list[str]:
    """The names of the extra states that Megatron's layers expect. Without fp8 these states are empty."""
    names = [f"{match[1]}{_SUFFIX}" for name in tensors if (match := _LINEAR.fullmatch(name))]
    # The last stage has an output layer even if it uses the table of the embedding.
    tied = target.shared_table is not None and (target.shared_table[0] == HEAD or is_tied(target.args))
    headed = HEAD in tensors or (tied and home(target, HEAD) == (place.pp, number))
    return names + [HEAD.replace(".weight", _SUFFIX)] * headed


def _with_states(tensors: Mapping[str, Value], states: Mapping[str, Value]) -> dict[str, Value]:
    """Tensors and extra states, ordered: an extra state follows the tensors of its module, if there are any."""
    last = {name.rpartition(".")[0]: name for name in tensors}
    behind: dict[str, list[str]] = {}
    for name in states:
        if is_extra_state(name) and (module := name.removesuffix(_SUFFIX)) in last:
            behind.setdefault(last[module], []).append(name)
    items: dict[str, Value] = {}
    for name, tensor in tensors.items():
        items[name] = tensor
        items |= {state: states[state] for state in behind.get(name, ())}
    return items | {name: value for name, value in states.items() if name not in items}


def _nested(items: Mapping[str, Value]) -> StdDict:
    """The items as a nested state dict for names from before Megatron core, else as a flat one."""
    root = StdDict()
    for name, value in items.items():
        parts = name.split(".")
        if parts[0] not in _BEFORE_CORE:
            root[name] = value
            continue
        depth = 1 if parts[0] != "language_model" else 3 if parts[1:2] == ["embedding"] else 2
        within = root
        for part in parts[: min(depth, len(parts) - 1)]:
            within = within.setdefault(part, StdDict())
        within.setdefault(".".join(parts[min(depth, len(parts) - 1) :]), value)
    return root
