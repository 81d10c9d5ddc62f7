"""Plan all files of a new checkpoint: model and optimizer of every rank, and the layers of a pipeline."""

from collections.abc import Iterator
from dataclasses import replace

from ckpt_formats.containers.torchfile_tree import tree_part
from ckpt_formats.core.checkpoint import MODEL, Group, Parameter
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.values import StdDict
from ckpt_formats.engines.deepspeed.pipeline import Pipeline, split_name
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.engines.deepspeed.write_model import model3_file, model_file, shards_of_ranks
from ckpt_formats.engines.deepspeed.write_optimizer import RankShards, zero3_file, zero12_file


def parts(target: WriteLayout) -> Iterator[FilePlan]:
    """The files of every rank. Raises `Unsupported` or `BadRules` for what DeepSpeed could not load."""
    step = target.source.origin.step
    folder = f"global_step{0 if step is None else step}"
    if target.pipeline is None:
        for tp_rank, shards in enumerate(shards_of_ranks(target)):
            yield from _rank_parts(target, folder, 0, tp_rank, shards)
        return
    for pp_rank in range(target.pp):
        stage = _stage(target, target.pipeline, pp_rank)
        for tp_rank, shards in enumerate(shards_of_ranks(stage)):
            yield from _rank_parts(stage, folder, pp_rank, tp_rank, shards)
    for tp_rank, shards in enumerate(shards_of_ranks(target)):
        yield from _layer_parts(target.pipeline, folder, tp_rank, shards)


def _rank_parts(target: WriteLayout, folder: str, pp_rank: int, tp_rank: int, shards: RankShards) -> Iterator[FilePlan]:
    mp = f"mp_rank_{pp_rank * target.tp + tp_rank:02}"
    bf16 = "bf16_" if target.dtype.name == "bfloat16" else ""
    rank = {"pp": pp_rank, "tp": tp_rank}
    if target.stage == 3:
        for dp in range(target.dp):
            file = f"{folder}/zero_pp_rank_{dp}_{mp}_model_states.pt"
            tree = model3_file(target, shards, dp, f"zero_pp_rank_{dp}_{mp}")
            yield tree_part(file, tree, shards.values(), "model", {**rank, "dp": dp})
    else:
        tree = model_file(target, shards, mp)
        if target.pipeline is not None:  # the weights are in the layers' files
            tree |= {"module": None, "buffer_names": []}
        yield tree_part(f"{folder}/{mp}_model_states.pt", tree, shards.values(), "model", rank)
    for dp in range(target.dp if target.stage else 0):
        optimizer = zero3_file if target.stage == 3 else zero12_file
        tree = optimizer(target, shards, dp, f"zero_pp_rank_{dp}_{mp}")
        file = f"{folder}/{bf16}zero_pp_rank_{dp}_{mp}_optim_states.pt"
        yield tree_part(file, tree, shards.values(), "optimizer", {**rank, "dp": dp})


def _stage(target: WriteLayout, pipeline: Pipeline, pp_rank: int) -> WriteLayout:
    """The target with only the parameters of one pipeline stage."""
    source = target.source
    parameters: dict[str, Parameter] = {
        name: parameter
        for name, parameter in source.parameters.items()
        if parameter.role == "extra" or pp_rank in pipeline.stages_of(name)
    }
    groups = tuple(Group(group.options, tuple(n for n in group.names if n in parameters)) for group in source.groups)
    for g, group in enumerate(groups):
        if not group.names:
            raise Unsupported(f"pipeline stage {pp_rank} has no parameter of the optimizer's group {g}")
    aliases = {alias: name for alias, name in source.aliases.items() if name in parameters}
    return replace(target, source=replace(source, parameters=parameters, groups=groups, aliases=aliases))


def _layer_parts(pipeline: Pipeline, folder: str, tp_rank: int, shards: RankShards) -> Iterator[FilePlan]:
    layers: dict[int, StdDict] = {}
    for name, parameter in shards.items():
        for layer in pipeline.layers_of(name):
            layers.setdefault(layer, StdDict())[split_name(name)[2]] = parameter.states[MODEL]
    for layer, tree in sorted(layers.items()):
        file = f"{folder}/layer_{layer:02}-model_{tp_rank:02}-model_states.pt"
        stored = [p for name, p in shards.items() if layer in pipeline.layers_of(name)]
        yield tree_part(file, tree, stored, "model", {"tp": tp_rank, "layer": layer})
