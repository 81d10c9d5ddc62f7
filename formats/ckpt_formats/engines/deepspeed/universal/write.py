"""A checkpoint as the files of a universal folder that DeepSpeed loads at any ZeRO stage from 1 to 3.

Whole tensors, so neither the folder nor the load depends on any degree. Where
DeepSpeed cuts them for tensor parallelism, the entries beside a tensor say how:
they are rules in its own words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.torchfile_tree import tree_part
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, StdDict, Value
from ckpt_formats.engines.deepspeed.pipeline import pipeline_of
from ckpt_formats.engines.deepspeed.universal.folder import DIMENSIONS, OPTIMIZER
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
"""All that DeepSpeed loads at stage 3."""
_MOST_NAME = 255


@dataclass(frozen=True, kw_only=True)
class UniversalOptions:
    """For which ranks the files of the model are written. None: as the source has them."""

    dp: int | None = None
    """Data-parallel ranks; only stated, since nothing is sharded over them."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    zero: int | None = None
    """The ZeRO stage that is to load it, 1 to 3."""
    vocab_rows: int | None = None
    """Rows of the vocabulary's tables with their padding."""
    rules: tuple[Rule, ...] = ()
    """The user's, before those of the source."""


def resolve_universal(source: Checkpoint, options: UniversalOptions) -> WriteLayout:
    """Raises `Unsupported` or `BadRules` for what cannot be written, naming why."""
    if options.zero == 0:
        raise Unsupported("DeepSpeed loads no universal checkpoint at ZeRO stage 0", hint="Say --zero 1, 2 or 3.")
    said: Value = source.origin.layout.get("zero_stage")
    stage = options.zero or (int(said) if said in (1, 2, 3) else 1)
    # One rank each, whatever is asked: nothing is cut, and no order of a flat buffer depends on it.
    target = layout_at(source, options.rules, options.vocab_rows, stage, 1, options.tp or 1)
    for name in target.parameters:
        _check_name(name)
    if any(group.options.get("use_muon") for group in source.groups) and not target.own_bf16:
        raise Unsupported(
            "DeepSpeed cuts Muon's momentum when it loads a universal checkpoint, and stops at the first step after",
            hint="Write `deepspeed`.",
        )
    return target


def parts(target: WriteLayout, options: UniversalOptions) -> Iterator[FilePlan]:
    """The model's files, the optimizer's, and those of every trained parameter."""
    reason = _not_for_stage3(target)
    if reason and options.zero == 3:
        raise Unsupported(f"DeepSpeed could not load it at ZeRO stage 3: {reason}", hint="Say --zero 1 or 2.")
    step = target.source.origin.step
    folder = f"global_step{0 if step is None else step}_universal"
    for tp_rank, local in enumerate(shards_of_ranks(target)):
        mp, where = f"mp_rank_{tp_rank:02}", {"tp": tp_rank}
        tree = {**model_file(target, local, mp), "dp_world_size": _dp(target, options)}
        tree[DIMENSIONS] = {**tree[DIMENSIONS], **_pipeline(target)}
        yield tree_part(f"{folder}/{mp}{MODEL_FILE}", tree, local.values(), "model", where)
        if not reason:  # a load at stage 3 looks for another name, and takes no weights
            tree = {**tree, "module": StdDict(), "frozen_param_fragments": None, "frozen_param_shapes": None}
            yield tree_part(f"{folder}/zero_pp_rank_0_{mp}{MODEL_FILE}", tree, (), "model", where)
    yield tree_part(f"{folder}/{OPTIMIZER}", _optimizer_file(target, not reason), (), "optimizer")
    for group in target.source.groups:
        for name in group.names:
            parameter = target.parameters[name]
            for state, held in _files(target, parameter).items():
                yield tree_part(f"{folder}/zero/{name}/{state}.pt", held, (parameter,), "optimizer")


def _dp(target: WriteLayout, options: UniversalOptions) -> int:
    """For whoever reads the folder: DeepSpeed, when loading it, does not care."""
    said: Value = target.source.origin.layout.get("dp")
    return options.dp or (int(said) if is_natural(said) and said else 1)


def _pipeline(target: WriteLayout) -> dict[str, Value]:
    """Which layers are on which stage. DeepSpeed has no place for it here, and does not look."""
    found = pipeline_of(target.source.origin.layout.get("pipeline"))
    return {} if found is None else {"pipeline": found.to_json()}


def _files(target: WriteLayout, parameter: Parameter) -> dict[str, Value]:
    """What the folder of a parameter holds, by state. Raises `Unsupported` for states that DeepSpeed could not load."""
    held: dict[str, Value] = {}
    entries = _entries(target, parameter)
    vectors = {MASTER, *vectors_of(parameter)}
    for state, tensor in parameter.states.items():
        if state in vectors:
            _check_name(state)
            held[state] = {**entries, "param": tensor}
    scalars: dict[str, Value] = {**parameter.values}
    scalars |= {s: t for s, t in parameter.states.items() if s not in vectors and s != MODEL}
    for state, value in scalars.items():
        if state != "step":
            raise Unsupported(
                f"the optimizer keeps `{printable(state)}` of `{printable(parameter.name)}`, for which DeepSpeed's "
                "universal "
                "checkpoint has no place",
                hint="Write `deepspeed` or `universal`.",
            )
        held[state] = value
    return held


def _entries(target: WriteLayout, parameter: Parameter) -> dict[str, Value]:
    """How to cut a tensor, in DeepSpeed's words."""
    if not any(rule.matches(parameter.name) for rule in target.layout.rules):
        return {}
    rule, shape = target.layout.rule(parameter.name), parameter.weight.shape
    entries = _cut(rule, shape) if rule.how == "sharded" else {}
    return {**entries, "vocab_tensor": True} if rule.vocabulary is not None else entries


def _cut(rule: Rule, shape: Sequence[int]) -> dict[str, Value]:
    if isinstance(rule.fused, int):
        pieces = {} if rule.fused == 1 else {"param_n_sub_params": rule.fused}
        return {"cat_dim": rule.axis, **pieces}
    lengths = tuple(rule.fused if axis == rule.axis else length for axis, length in enumerate(shape))
    cls = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    state = {"patterns": [rule.pattern], "shape": lengths, "partition_dim": rule.axis}
    return {"sub_param_shape": Record(cls, (), state=state, new=True)}


def _optimizer_file(target: WriteLayout, stage3: bool) -> dict[str, Value]:
    """What is no parameter's own: groups' options, the loss scaler, and for stage 3 the step."""
    groups = param_groups(target.source.groups)
    items = {**scaler_items(target), "ds_version": ds_version(target), "param_groups": groups}
    if stage3:
        steps = [{"step": state_of([target.parameters[n] for n in g.names])["step"]} for g in target.source.groups]
        # At stage 3 DeepSpeed gives the options of the first group to all: it gets those that are the same in all,
        # so that the others stay as the training script sets them.
        common = {
            k: v for k, v in groups[0].items() if all(k in g and _equal(g[k], v) for g in groups) and k != "params"
        }
        shared = [{**common, "params": group["params"]} for group in groups]
        items["optimizer_state_dict"] = {"state": dict(enumerate(steps)), "param_groups": shared}
    return with_source_items(target, items, "optimizer_state")


def _equal(one: Value, other: Value) -> bool:
    return type(one) is type(other) and bool(one == other)


def _not_for_stage3(target: WriteLayout) -> str | None:
    """Why DeepSpeed could not load it at stage 3, if so. Raises `Unsupported` for groups that no stage can hold."""
    steps: dict[bytes, str] = {}
    reason: str | None = None
    with Reader(check=False) as reader:
        for g, group in enumerate(target.source.groups):
            if not group.names:
                raise Unsupported(f"group {g} of the optimizer has no parameters")
            members = [target.parameters[name] for name in group.names]
            kept = state_of(members)
            if {MASTER, *vectors_of(members[0])} != _STAGE3:
                reason = f"it needs exactly exp_avg and exp_avg_sq, but there are {', '.join(kept) or 'none'}"
            elif "step" not in kept:
                reason = "it needs the optimizer's step"
            else:
                value = kept["step"]
                said = read(value, reader).tobytes() if isinstance(value, Tensor) else repr(value).encode()
                steps.setdefault(said, group.names[0])
    if len(steps) > 1:
        reason = "it knows one step for all groups, but `{}` and `{}` differ".format(
            *map(printable, list(steps.values())[:2])
        )
    return reason


def _check_name(name: str) -> None:
    """A name becomes a folder's: it must not lead out of the folder above, nor into another."""
    parts = PurePosixPath(name).parts
    if (
        not parts
        or "/".join(parts) != name
        or any(part in ("..", "/") or part.endswith(".pt") or "\0" in part for part in parts)
        or any(len(part.encode("utf-8", "surrogateescape")) > _MOST_NAME - len(".pt") for part in parts)
    ):
        raise Unsupported(
            f"`{printable(name)[:100]}` cannot be the name of a folder, which DeepSpeed's universal checkpoint needs",
            hint="Write `deepspeed` or `universal`.",
        )
