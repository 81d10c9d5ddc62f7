"""The arguments of a run with a new layout: the source's, with the new degrees and stages."""

from collections.abc import Mapping
from dataclasses import replace

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel
from ckpt_formats.engines.megatron.shared.stages import Stages, stages_of

LAYOUT_STRING = "pipeline_model_parallel_layout"
_FIRST, _LAST = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
_EVEN: Mapping[str, Value] = {
    _FIRST: None,
    _LAST: None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    LAYOUT_STRING: None,
}


def with_parallel(args: Arguments, parallel: Parallel, stages: Stages, changes: Mapping[str, Value]) -> Arguments:
    """The arguments with these degrees, these stages and the values in `changes`.

    Arguments that Megatron derives from its options are set, too, because Megatron saves the derived values.
    """
    virtual_stages = stages.chunks if parallel.pp > 1 and stages.chunks > 1 else None
    cp = args.number("context_parallel_size", default=1) or 1
    cp = cp if parallel.dp % cp == 0 else 1
    changed: dict[str, Value] = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "data_parallel_size": parallel.dp // cp,
        "world_size": parallel.tp * parallel.pp * parallel.dp,
        **changes,
    }
    state = args.record.state if isinstance(args.record.state, dict) else {}
    derived: dict[str, Value] = {
        "context_parallel_size": cp,
        "num_virtual_stages_per_pipeline_rank": virtual_stages,
        "num_layers_per_virtual_pipeline_stage": None,
        "inprocess_active_world_size": changed["world_size"],
        **({"sequence_parallel": False} if parallel.tp == 1 else {}),
    }
    changed |= {name: value for name, value in derived.items() if name in state}
    old = {"model_parallel_size": parallel.tp, "transformer_pipeline_model_parallel_size": parallel.pp}
    changed |= {name: degree for name, degree in old.items() if state.get(name) is not None}
    new = with_arguments(args, changed)
    return with_arguments(new, _stages(new, stages))


def with_arguments(args: Arguments, changed: Mapping[str, Value]) -> Arguments:
    """The arguments with the values in `changed`."""
    state = args.record.state
    return replace(args, record=replace(args.record, state={**(state if isinstance(state, dict) else {}), **changed}))


def _stages(args: Arguments, stages: Stages) -> Mapping[str, Value]:
    """The options that give these stages.

    Tried in this order: the present options, even stages, another size of the first or last stage, a layout string.
    """
    first, last = (sum(stages.counts[end :: stages.pp]) for end in (0, stages.pp - 1))
    end_options: list[Mapping[str, Value]] = [{_FIRST: first}, {_LAST: last}, {_FIRST: first, _LAST: last}]
    unchanged = {} if stages.pp > 1 else {_FIRST: None, _LAST: None, LAYOUT_STRING: None}
    candidates: list[Mapping[str, Value]] = [
        unchanged,
        _EVEN,
        *({**_EVEN, **end} for end in end_options if stages.pp > len(end)),
    ]
    options = next(
        (options for options in candidates if _give_stages(with_arguments(args, options), stages)),
        {**_EVEN, LAYOUT_STRING: layout_string(stages)},
    )
    state = args.record.state if isinstance(args.record.state, dict) else {}
    return {name: value for name, value in options.items() if value or name in state}


def _give_stages(args: Arguments, stages: Stages) -> bool:
    """True if these arguments give these stages."""
    try:
        return stages_of(args, stages.pp) == stages
    except UnsupportedError:
        return False


def layout_string(stages: Stages) -> str:
    """The stages as a layout string. E is the embedding, t a layer, L the loss.

    >>> layout_string(Stages((1, 3, 0), 3))
    'Et|ttt|L'
    """
    return "E" + "|".join("t" * count for count in stages.counts) + "L"
