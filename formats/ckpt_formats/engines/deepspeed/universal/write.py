"""Write a checkpoint as a universal folder, which DeepSpeed loads at any ZeRO stage from 1 to 3.

Tensors are complete, so neither the folder nor the load depends on any degree. If
DeepSpeed shards a tensor for tensor parallelism, the fields next to it state how:
they are DeepSpeed's own form of rules.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from ckpt_formats.containers.torchfile_tree import tree_part
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.claims import MAX_FILE_NAME
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, StdDict, Value, is_natural
from ckpt_formats.engines.deepspeed.pipeline import pipeline_of
from ckpt_formats.engines.deepspeed.universal.folder import DIMENSIONS, OPTIMIZER
from ckpt_formats.engines.deepspeed.universal.options import UniversalOptions
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout, layout_at
from ckpt_formats.engines.deepspeed.write_model import model_file, shards_of_ranks
from ckpt_formats.engines.deepspeed.write_optimizer import (
    ds_version,
    param_groups,
    scaler_items,
    state_of,
    vectors_of,
    with_source_items,
)

MODEL_FILE = "_model_states.pt"
_STAGE3 = {MASTER, "exp_avg", "exp_avg_sq"}
"""The only states that DeepSpeed loads at stage 3."""


def resolve_universal(source: Checkpoint, options: UniversalOptions) -> WriteLayout:
    """The layout to write. Raises `UnsupportedError` or `RulesError` with the reason if it cannot be written."""
    stated: Value = source.origin.layout.get("zero_stage")
    stage = options.zero or (int(stated) if stated in (1, 2, 3) else 1)
    # One data-parallel rank always: nothing is sharded over them, and there is no flat buffer.
    target = layout_at(source, options.rules, options.vocab_rows, stage, 1, options.tp or 1)
    for name in target.parameters:
        _check_name(name)
    if any(group.options.get("use_muon") for group in source.groups) and not target.own_bf16:
        raise UnsupportedError(
            "DeepSpeed splits Muon's momentum when it loads a universal checkpoint, and fails at the next step",
            hint="Write `deepspeed`.",
        )
    return target


def parts(target: WriteLayout, options: UniversalOptions) -> Iterator[FilePlan]:
    """The model's files, the optimizer's, and those of every trained parameter."""
    reason = _not_for_stage3(target)
    if reason and options.zero == 3:
        raise UnsupportedError(f"DeepSpeed could not load it at ZeRO stage 3: {reason}", hint="Give --zero 1 or 2.")
    step = target.source.origin.step
    folder = f"global_step{0 if step is None else step}_universal"
    for tp_rank, shards in enumerate(shards_of_ranks(target)):
        mp, where = f"mp_rank_{tp_rank:02}", {"tp": tp_rank}
        tree = {**model_file(target, shards, mp), "dp_world_size": _dp(target, options)}
        tree[DIMENSIONS] = {**tree[DIMENSIONS], **_pipeline(target)}
        yield tree_part(f"{folder}/{mp}{MODEL_FILE}", tree, shards.values(), "model", where)
        if not reason:  # a load at stage 3 looks for another name, and takes no weights
            tree = {**tree, "module": StdDict(), "frozen_param_fragments": None, "frozen_param_shapes": None}
            yield tree_part(f"{folder}/zero_pp_rank_0_{mp}{MODEL_FILE}", tree, (), "model", where)
    yield tree_part(f"{folder}/{OPTIMIZER}", _optimizer_file(target, not reason), (), "optimizer")
    for group in target.source.groups:
        for name in group.names:
            parameter = target.parameters[name]
            for state, values in _files(target, parameter).items():
                yield tree_part(f"{folder}/zero/{name}/{to_stored(state)}.pt", values, (parameter,), "optimizer")


def _dp(target: WriteLayout, options: UniversalOptions) -> int:
    """The number of data-parallel ranks, for other readers of the folder: DeepSpeed ignores it."""
    stated: Value = target.source.origin.layout.get("dp")
    return options.dp or (int(stated) if is_natural(stated) and stated else 1)


def _pipeline(target: WriteLayout) -> dict[str, Value]:
    """Which layers are on which stage, for us: DeepSpeed ignores this field."""
    pipeline = pipeline_of(target.source.origin.layout.get("pipeline"))
    return {} if pipeline is None else {"pipeline": pipeline.to_json()}


def _files(target: WriteLayout, parameter: Parameter) -> dict[str, Value]:
    """The files of a parameter's folder, by state. Raises `UnsupportedError` for states that DeepSpeed cannot load."""
    files: dict[str, Value] = {}
    entries = _entries(target, parameter)
    vectors = {MASTER, *vectors_of(parameter)}
    for state, tensor in parameter.states.items():
        if state in vectors:
            _check_name(to_stored(state))
            files[state] = {**entries, "param": tensor}
    scalars: dict[str, Value] = {**parameter.values}
    scalars |= {s: t for s, t in parameter.states.items() if s not in vectors and s != MODEL}
    for state, value in scalars.items():
        if state != "step":
            raise UnsupportedError(
                f"the optimizer has `{printable(state)}` of `{printable(parameter.name)}`, for which DeepSpeed's "
                "universal "
                "checkpoint has no place",
                hint="Write `deepspeed` or `universal`.",
            )
        files[state] = value
    return files


def _entries(target: WriteLayout, parameter: Parameter) -> dict[str, Value]:
    """The fields by which DeepSpeed shards a tensor."""
    if not any(rule.matches(parameter.name) for rule in target.layout.rules):
        return {}
    rule, shape = target.layout.rule(parameter.name), parameter.weight.shape
    entries = _slicing(rule, shape) if rule.how == "sharded" else {}
    return {**entries, "vocab_tensor": True} if rule.vocabulary is not None else entries


def _slicing(rule: Rule, shape: Sequence[int]) -> dict[str, Value]:
    if isinstance(rule.fused, int):
        count = {} if rule.fused == 1 else {"param_n_sub_params": rule.fused}
        return {"cat_dim": rule.axis, **count}
    lengths = tuple(rule.fused if axis == rule.axis else length for axis, length in enumerate(shape))
    cls = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    state = {"patterns": [rule.pattern], "shape": lengths, "partition_dim": rule.axis}
    return {"sub_param_shape": Record(cls, (), state=state, new=True)}


def _optimizer_file(target: WriteLayout, stage3: bool) -> dict[str, Value]:
    """The items of the optimizer as a whole: groups' options, the loss scaler, and for stage 3 the step."""
    groups = param_groups(target.source.groups)
    items = {**scaler_items(target), "ds_version": ds_version(target), "param_groups": groups}
    if stage3:
        steps = [{"step": state_of([target.parameters[n] for n in g.names])["step"]} for g in target.source.groups]
        # At stage 3 DeepSpeed gives the options of the first group to all groups. So only options that are the same in
        # all groups are written; the others stay as the training script sets them.
        common = {
            k: v for k, v in groups[0].items() if all(k in g and _equal(g[k], v) for g in groups) and k != "params"
        }
        shared = [{**common, "params": group["params"]} for group in groups]
        items["optimizer_state_dict"] = {"state": dict(enumerate(steps)), "param_groups": shared}
    return with_source_items(target, items, "optimizer_state")


def _equal(one: Value, other: Value) -> bool:
    return type(one) is type(other) and bool(one == other)


def _not_for_stage3(target: WriteLayout) -> str | None:
    """Why DeepSpeed cannot load it at stage 3; None if it can.

    Raises `UnsupportedError` for groups that no stage loads.
    """
    steps: dict[bytes, str] = {}
    reason: str | None = None
    with Reader(check=False) as reader:
        for g, group in enumerate(target.source.groups):
            if not group.names:
                raise UnsupportedError(f"group {g} of the optimizer has no parameters")
            members = [target.parameters[name] for name in group.names]
            states = state_of(members)
            if {MASTER, *vectors_of(members[0])} != _STAGE3:
                reason = f"it needs exactly exp_avg and exp_avg_sq, but there are {', '.join(states) or 'none'}"
            elif "step" not in states:
                reason = "it needs the optimizer's step"
            else:
                value = states["step"]
                step = read(value, reader).tobytes() if isinstance(value, Tensor) else repr(value).encode()
                steps.setdefault(step, group.names[0])
    if len(steps) > 1:
        reason = "it knows one step for all groups, but `{}` and `{}` differ".format(
            *map(printable, list(steps.values())[:2])
        )
    return reason


def _check_name(name: str) -> None:
    """Raise `UnsupportedError` if a name cannot be that of a folder, or leads out of its parent or into another
    folder."""
    parts = PurePosixPath(name).parts
    if (
        not parts
        or "/".join(parts) != name
        or any(part in ("..", "/") or part.endswith(".pt") or "\0" in part for part in parts)
        or any(len(part.encode("utf-8", "surrogateescape")) > MAX_FILE_NAME - len(".pt") for part in parts)
    ):
        raise UnsupportedError(
            f"`{printable(name)[:100]}` cannot be the name of a folder, which DeepSpeed's universal checkpoint needs",
            hint="Write `deepspeed` or `universal`.",
        )
