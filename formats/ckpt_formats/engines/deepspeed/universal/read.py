"""Read a universal folder: masters and moments from `zero`, everything else from the model's files.

DeepSpeed's converter also writes folders of buffers, frozen parameters and tied names,
converted to floats. We take their values from the model's files instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from ckpt_codecs import Rounded
from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Origin, Parameter, Role, SourceFile
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.identity import in_threads
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_names import STORED_MASTER, from_stored
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural, kind_of
from ckpt_formats.engines.deepspeed.agreement import step_notices
from ckpt_formats.engines.deepspeed.extras import collect_extras
from ckpt_formats.engines.deepspeed.flat_partitions import undo_round_robin
from ckpt_formats.engines.deepspeed.lookups import get, is_tensor, shape_of, tensor, vector
from ckpt_formats.engines.deepspeed.merge import merge_groups, merge_rows, merge_stages
from ckpt_formats.engines.deepspeed.optimizer_states import options_of, split_state
from ckpt_formats.engines.deepspeed.pipeline import pipeline_of
from ckpt_formats.engines.deepspeed.rank import RankState
from ckpt_formats.engines.deepspeed.read import notices_of, origin_of, own_rules
from ckpt_formats.engines.deepspeed.step import OpenedStep, open_step, rank_name, source_files
from ckpt_formats.engines.deepspeed.universal.folder import DIMENSIONS, UniversalFolder
from ckpt_formats.engines.deepspeed.universal.master_check import check_masters
from ckpt_formats.engines.deepspeed.weights import model_dtype, non_tensor_items, read_module, with_aliases
from ckpt_formats.engines.deepspeed.zero12 import stated_shapes
from ckpt_formats.state_dicts.statements import Statement, check_agreement


def read_universal(path: Path, folder: UniversalFolder, options: ReadOptions) -> Checkpoint:
    """The index of a universal checkpoint. Raises a subclass of `CkptError` if it cannot be read."""
    step, optimizer = open_step(folder.models), open_file(folder.optimizer)
    ranks = [_rank(step, optimizer, mp) for mp in range(step.tp * step.pp)]
    stages = merge_rows(ranks, step.tp, lambda mp: Layout((*options.rules, *own_rules(step, mp))))
    merged, tied = merge_stages(stages)
    trained = {name: p for name, p in merged.items() if p.role == "parameter"}
    aliases = {alias: name for rank in ranks for alias, name in rank.aliases.items() if name in merged}
    shadows = _shadows(folder, merged, aliases)
    files = _open(folder, trained)
    steps = _steps_of_sub_groups(step, optimizer)
    parameters = {
        name: _trained(p, files.get(name, {}), steps.get(name, {}), step) if name in trained else p
        for name, p in merged.items()
    }
    groups = merge_groups([rank.groups for rank in ranks], folder.path)
    _check_steps(parameters, groups, files, folder.path)
    check_masters(parameters, _is_round_robin_conversion(step, optimizer), folder.path)
    models = {rank_name(file.path): file for mp in range(folder.models.mp) for file in step.models(mp)}
    extra_items = {file.path: non_tensor_items(file) for file in models.values()}
    extras = collect_extras(models, {"optimizer_state": optimizer}, parameters, extra_items)
    spare = [open_file(file) for file in folder.spare]
    opened = (
        *step.files.values(),
        *spare,
        optimizer,
        *(file for by_state in files.values() for file in by_state.values()),
    )
    return Checkpoint(
        path=path,
        origin=_origin(step, [list(stage) for stage in stages]),
        parameters=parameters,
        groups=groups,
        extras=extras,
        aliases=aliases,
        files=(*source_files(step), *_source_files(spare, optimizer, files)),
        seals=tuple(seal for file in opened for seal in file.seals()),
        notices=(
            *notices_of(tied),
            *step_notices(list(models.values())),
            *_notices(step, shadows, parameters, groups),
        ),
    )


def _rank(step: OpenedStep, optimizer: TorchFile, mp: int) -> RankState:
    """The state of a model-parallel rank from its model files. A trained parameter may have a shape, but no values."""
    model = step.models(mp)[0]
    weights = read_module(step.models(mp), step.stage3)
    tensors = with_aliases(weights)
    listed = stated_shapes(model)
    shapes = {name: shape for group in listed for name, shape in group.items()}
    parameters: dict[str, Parameter] = {}
    for name in dict.fromkeys((*weights.order, *shapes, *tensors)):
        role: Role
        if name in shapes:
            role, tensor = "parameter", tensors.get(name, Tensor(shapes[name], model_dtype(step.config), ()))
        elif name in tensors and (name in weights.buffers or weights.may_be_frozen(name)):
            role, tensor = "buffer" if name in weights.buffers else "frozen", tensors[name]
        elif name in weights.aliases:
            continue
        else:
            raise CorruptError(
                f"`{name}` is in the model, but it is neither trained nor frozen nor a buffer", where=model.path
            )
        if name in shapes and tensor.shape != shapes[name]:
            raise CorruptError(
                f"`{name}` has the shape {list(tensor.shape)}, but is listed as {list(shapes[name])}", where=model.path
            )
        parameters[name] = Parameter(name, role, {MODEL: tensor})
    return RankState(parameters, tuple(_groups(step, optimizer, mp, listed)), weights.aliases)


def _groups(step: OpenedStep, optimizer: TorchFile, mp: int, shapes: Sequence[Mapping[str, Shape]]) -> Iterator[Group]:
    listed = get(optimizer.root, "param_groups", list, optimizer.path)
    if step.stage3:
        for group in listed:
            members = range(len(shapes)) if len(listed) == 1 else get(group, "params", list, optimizer.path)
            names = tuple(name for s in members for name in get(shapes, s, dict, optimizer.path))
            yield Group(options_of(group, optimizer.path), names)
        return
    if mp == 0 and len(listed) != len(shapes):
        raise CorruptError(
            f"the optimizer has {len(listed)} groups, but the model's file lists {len(shapes)}",
            where=optimizer.path,
            hint="Files of several runs may be mixed.",
        )
    for g, group_shapes in enumerate(shapes):
        names = tuple(group_shapes)
        if _round_robin(step) and (ranks := _ranks(optimizer, g)) < len(names):
            names = tuple(undo_round_robin(names, ranks))
        yield Group(options_of(listed[g], optimizer.path) if g < len(listed) else {}, names)


def _round_robin(step: OpenedStep) -> bool:
    zero = step.config.get("zero_optimization")
    return not step.stage3 and isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))


def _ranks(optimizer: TorchFile, g: int) -> int:
    """The number of ranks over which a group was split, if DeepSpeed's converter recorded it; otherwise 1."""
    counts = optimizer.root.get("partition_count")
    count = counts[g] if isinstance(counts, list) and g < len(counts) else 1
    return int(count) if is_natural(count) and count else 1


def _is_round_robin_conversion(step: OpenedStep, optimizer: TorchFile) -> bool:
    """Was the folder written by DeepSpeed's converter, from a run with `round_robin_gradients` on several ranks?"""
    counts = optimizer.root.get("partition_count")
    groups = range(len(counts)) if isinstance(counts, list) else ()
    return _round_robin(step) and any(_ranks(optimizer, g) > 1 for g in groups)


def _open(folder: UniversalFolder, trained: Mapping[str, Parameter]) -> dict[str, dict[str, TorchFile]]:
    """The opened files of the trained parameters, by parameter and state."""
    for name, parameter in trained.items():
        if name not in folder.states and parameter.weight.size:
            raise IncompleteError(
                f"parameter `{printable(name)}` has no folder under `zero`",
                where=folder.path,
                hint="The conversion did not finish, or files were deleted: convert again.",
            )
    paths = [path for name in trained for path in folder.states.get(name, {}).values()]
    opened = dict(zip(paths, in_threads(open_file, paths), strict=True))
    return {name: {from_stored(file): opened[p] for file, p in folder.states.get(name, {}).items()} for name in trained}


def _trained(
    parameter: Parameter, files: Mapping[str, TorchFile], steps: Mapping[str, Value], step: OpenedStep
) -> Parameter:
    weight = parameter.states[MODEL]
    if files:
        states, values = read_states(parameter.name, files, weight.shape)
    else:  # without elements
        states, values = {MASTER: Tensor(weight.shape, weight.dtype, ())}, {}
    for key, value in steps.items():
        if key not in states and key not in values:
            (states if isinstance(value, Tensor) else values)[key] = value
    if not any(True for _ in weight.sources()):
        weight = Tensor.of(DerivedBlob(Rounded(), states[MASTER], weight.dtype))
    return replace(parameter, states={**states, MODEL: weight}, values=values)


def _check_steps(
    parameters: Mapping[str, Parameter],
    groups: Sequence[Group],
    files: Mapping[str, Mapping[str, TorchFile]],
    where: Path,
) -> None:
    """Raise `CorruptError` if parameters of one group are at different steps. ZeRO updates them together."""
    with Reader(check=False) as reader:
        for number, group in enumerate(groups):
            statements = []
            for name in group.names:
                parameter = parameters[name]
                step = parameter.states.get("step", parameter.values.get("step"))
                value = read(step, reader).reshape(-1).tolist() if isinstance(step, Tensor) and step.size == 1 else step
                value = value[0] if isinstance(value, list) else value
                file = files.get(name, {}).get("step")
                place = (
                    f"the folder of `{printable(name)}`" if file is None else file.path.relative_to(where).as_posix()
                )
                statements.append(Statement(f"the step of optimizer group {number}", place, value))
            check_agreement(statements, where)


def _steps_of_sub_groups(step: OpenedStep, optimizer: TorchFile) -> dict[str, dict[str, Value]]:
    """At stage 3: the scalars of each parameter's sub-group, which are not in the parameter's folder."""
    inner = optimizer.root.get("optimizer_state_dict")
    if not step.stage3 or not isinstance(inner, dict):
        return {}
    states = get(inner, "state", dict, optimizer.path)
    by_name: dict[str, dict[str, Value]] = {}
    for s, shapes in enumerate(stated_shapes(step.first)):
        state = split_state([states.get(s, {})], [optimizer])
        by_name |= {name: {**state.scalars, **state.values} for name in shapes}
    return by_name


def _shadows(folder: UniversalFolder, merged: Mapping[str, Parameter], aliases: Mapping[str, str]) -> list[str]:
    """Names that have a folder, but no optimizer states.

    Raises `CorruptError` if the model's files do not have a name.
    """
    names = [name for name in folder.states if name not in merged or merged[name].role != "parameter"]
    for name in names:
        if name not in merged and name not in aliases:
            raise CorruptError(
                f"`zero` has a folder `{printable(name)}`, but the model's files have no such parameter",
                where=folder.path,
                hint="Files of several runs may be mixed.",
            )
    return names


def _origin(step: OpenedStep, by_stage: list[list[str]]) -> Origin:
    """The origin. The stages of a pipeline are known only if we wrote the folder."""
    origin, dimensions = origin_of(step, by_stage), step.first.root.get(DIMENSIONS)
    pipeline = pipeline_of(dimensions.get("pipeline")) if isinstance(dimensions, dict) else None
    if pipeline is None:
        return origin
    return replace(origin, layout={**origin.layout, "pp": max(len(pipeline.stages), 1), "pipeline": pipeline.to_json()})


def _source_files(
    spare: Sequence[TorchFile], optimizer: TorchFile, files: Mapping[str, Mapping[str, TorchFile]]
) -> Iterator[SourceFile]:
    for file in spare:
        yield SourceFile(file.path, file.path.stat().st_size, "model")
    for file in (optimizer, *(file for by_state in files.values() for file in by_state.values())):
        yield SourceFile(file.path, file.path.stat().st_size, "optimizer")


def _notices(
    step: OpenedStep,
    shadows: Sequence[str],
    parameters: Mapping[str, Parameter],
    groups: Sequence[Group],
) -> Iterator[Notice]:
    if shadows:
        yield Notice(
            "the values of these buffers, frozen parameters or tied names are taken from the model file, "
            "not from the rounded or widened copies under zero/",
            tuple(shadows),
        )
    if any(group.options.get("amsgrad") for group in groups) and not any(
        "max_exp_avg_sq" in p.states for p in parameters.values()
    ):
        text = "the optimizer is AMSGrad, but DeepSpeed did not write its max_exp_avg_sq into this folder"
        yield Notice(text, weight=Weight.LOST)
    if not step.stage3 and not step.first.root.get("module"):
        text = (
            "a universal folder has no weights of pipeline layers: they are computed from the masters; "
            "buffers and frozen parameters, if the layers have any, are missing"
        )
        yield Notice(text, weight=Weight.LOST)


def read_states(name: str, files: Mapping[str, TorchFile], shape: Shape) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """The states and plain values of a parameter of this shape. `files` are by state.

    Raises `IncompleteError` if there is no master, `CorruptError` if the files contradict the shape.
    """
    if MASTER not in files:
        raise IncompleteError(
            f"`{name}` has optimizer states, but no {STORED_MASTER}.pt", where=next(iter(files.values())).path
        )
    shape = _expert_shape(files[MASTER]) or shape
    states: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for state, file in files.items():
        value = get(file.root, "param", object, file.path) if isinstance(file.root, dict) else file.root
        if not is_tensor(value):
            if state != "step" or not isinstance(value, (int, float)):
                raise CorruptError(f"expected a tensor, found {kind_of(value)}", where=file.path)
            values[state] = value
            continue
        stored = tensor(value, file.path)
        if stored.shape == (prod(shape),) != shape:
            stored = Tensor.of(vector(value, file.path).shaped(shape))
        if stored.shape != shape and (stored.shape or state == MASTER):
            raise CorruptError(
                f"`{name}` has the shape {list(stored.shape)}, but {list(shape)} in the model's files",
                where=file.path,
                hint="Files of several runs may be mixed.",
            )
        states[state] = stored
    return states, values


def _expert_shape(file: TorchFile) -> Shape | None:
    """The shape of a tensor of all experts, None for other tensors. The model's files have the shape of one rank."""
    if not isinstance(file.root, dict) or not file.root.get("is_expert_param"):
        return None
    shape = tensor(file.root.get("param"), file.path).shape
    count = shape_of([file.root.get("ep_num_experts")], file.path)
    if shape[:1] != count:
        raise CorruptError(f"a tensor of shape {list(shape)} should contain {count[0]} experts", where=file.path)
    return shape
