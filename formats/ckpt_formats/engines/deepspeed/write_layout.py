"""The layout of a DeepSpeed checkpoint to write, and the check that it is possible, before anything is written."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.deepspeed.options import LayoutOptions
from ckpt_formats.engines.deepspeed.pipeline import Pipeline, pipeline_of
from ckpt_formats.state_dicts.universal_info import ORIGIN, rules_of

_HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class WriteLayout:
    """A source, and the layout to write it in."""

    source: Checkpoint
    stage: int
    dp: int
    tp: int
    pp: int
    dtype: DType
    """The dtype of the model's weights."""
    config: Mapping[str, Value]
    """The run's configuration, with this stage in it."""
    layout: Layout
    pipeline: Pipeline | None = None
    vocab_rows: int | None = None

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters."""
        return {name: p for name, p in self.source.parameters.items() if p.role == "parameter"}

    @property
    def zero(self) -> Mapping[str, Value]:
        section = self.config["zero_optimization"]
        return section if isinstance(section, dict) else {}

    @property
    def padded_rows(self) -> int | None:
        """Rows of the vocabulary's tables with their padding: those of the options, else those of the source."""
        if self.vocab_rows is not None:
            return self.vocab_rows
        info = self.source.extras.get(ORIGIN)
        rows = info.get("padded_vocab_size") if isinstance(info, dict) else None
        return rows if is_natural(rows) else None

    def of_rank(self, name: str) -> Mapping[str, Value]:
        """The items in which this rank of the source differs from the first one."""
        ranks = self.source.extras.get("ranks")
        items = ranks.get(name) if isinstance(ranks, dict) else None
        return items if isinstance(items, dict) else {}

    def rule(self, parameter: Parameter) -> Rule | None:
        """The rule by which a parameter is sharded; None if every rank has all of it."""
        known = any(rule.matches(parameter.name) for rule in self.layout.rules)
        if parameter.role == "buffer" or not known:
            return None
        rule = self.layout.rule(parameter.name)
        return None if self.tp == 1 and rule.vocabulary is None else rule

    @property
    def own_bf16(self) -> bool:
        """Whether DeepSpeed's `BF16_Optimizer` will load it, as with fp32 gradients and stage 1."""
        types = self.config.get("data_types")
        fp32 = isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32"
        return self.stage == 1 and self.dtype.name == "bfloat16" and fp32 and not self.zero.get("offload_optimizer")


def resolve_layout(source: Checkpoint, options: LayoutOptions) -> WriteLayout:
    """The layout to write. Raises `UnsupportedError` or `RulesError` with the reason if it cannot be written."""
    layout = source.origin.layout
    stage = _first(options.zero, layout.get("zero_stage"), 1)
    dp = _first(options.dp, layout.get("dp"), 1)
    tp = _first(options.tp, layout.get("tp"), 1)
    requested_stages = len(options.stages) if options.stages and options.pp is None else options.pp
    pp = _first(requested_stages, layout.get("pp"), 1)
    if stage not in (0, 1, 2, 3):
        raise UnsupportedError(f"there is no ZeRO stage {stage}", hint="Stages are 0, 1, 2 and 3.")
    target = layout_at(source, options.rules, options.vocab_rows, stage, dp, tp)
    pipeline = _pipeline(source, pp, options.stages)
    if pipeline is not None and (stage > 1 or (stage == 0 and target.dtype.name == "bfloat16")):
        raise UnsupportedError(
            f"DeepSpeed's pipeline engine cannot load ZeRO stage {stage}{' in bf16' if stage == 0 else ''}",
            hint="Give --zero 1.",
        )
    return replace(target, pp=pp, pipeline=pipeline)


def layout_at(
    source: Checkpoint, own: Sequence[Rule], vocab_rows: int | None, stage: int, dp: int, tp: int
) -> WriteLayout:
    """The source at these degrees, without pipeline stages. Raises `UnsupportedError` or `RulesError`."""
    _check_kind(source)
    _check_options(source)
    source = with_masters(source)
    dtypes = Counter(p.weight.dtype.name for p in source.parameters.values() if p.role == "parameter")
    dtype = DTYPES[dtypes.most_common(1)[0][0]]
    info = source.extras.get(ORIGIN)
    rules = (*own, *(rules_of(info, source.path) if isinstance(info, dict) and info else ()))
    layout = Layout(tuple(rule for rule in rules if rule.how != "blocks" or len(rule.blocks) == tp))
    for name in source.parameters if tp > 1 else ():
        layout.rule(name)
    return WriteLayout(source, stage, dp, tp, 1, dtype, _config(source, stage, dtype), layout, None, vocab_rows)


def _first(*values: Any) -> int:
    return next(int(value) for value in values if value is not None)


def _pipeline(source: Checkpoint, pp: int, firsts: Sequence[int] | None) -> Pipeline | None:
    pipeline = pipeline_of(source.origin.layout.get("pipeline"))
    if pipeline is not None:
        return pipeline.split(pp, firsts)
    if pp > 1 or firsts:
        raise UnsupportedError(
            "the source is not a pipeline, so its layers are not known", hint="Leave --pp and --stages out."
        )
    return None


def _check_kind(source: Checkpoint) -> None:
    names = [name for name, p in source.parameters.items() if p.role == "parameter"]
    if any(".deepspeed_experts." in name for name in names):
        raise UnsupportedError("DeepSpeed's experts cannot be written yet", hint="Convert to `universal` or `torch`.")
    if not names or not source.groups:
        raise UnsupportedError(
            "a DeepSpeed checkpoint needs the optimizer's groups, and the source has none",
            hint="Start a new run from the weights: convert to `torch` or `safetensors`.",
        )


def _check_options(source: Checkpoint) -> None:
    if any("lr" not in group.options for group in source.groups):
        raise UnsupportedError(
            "the source does not hold the options of the optimizer's groups, such as the learning rate",
            hint="DeepSpeed's elastic checkpoints lack them: save without `elastic_checkpoint`.",
        )


def with_masters(source: Checkpoint) -> Checkpoint:
    """The source with a master for every trained parameter.

    Raises `UnsupportedError` if one is not in exactly one group.
    """
    grouped = [name for group in source.groups for name in group.names]
    trained = {name for name, p in source.parameters.items() if p.role == "parameter"}
    if len(set(grouped)) != len(grouped) or set(grouped) != trained:
        misplaced = sorted(trained ^ set(grouped)) or [name for name in grouped if grouped.count(name) > 1]
        raise UnsupportedError(f"parameter `{misplaced[0]}` is not in exactly one group of the optimizer")
    parameters: dict[str, Parameter] = {}
    for name, parameter in source.parameters.items():
        states = parameter.states
        if parameter.role == "parameter" and MASTER not in states:
            if parameter.weight.dtype.name in _HALF_TYPES:
                raise UnsupportedError(f"parameter `{name}` has no fp32 master, which DeepSpeed needs")
            states = {MASTER: parameter.weight, **states}
        parameters[name] = replace(parameter, states={MODEL: parameter.weight, **states})
    return replace(source, parameters=parameters, groups=tuple(Group(dict(g.options), g.names) for g in source.groups))


def _config(source: Checkpoint, stage: int, dtype: DType) -> dict[str, Value]:
    """The source's configuration, if it has one, with the new stage and without what depends on the old layout."""
    stated = source.extras.get("ds_config")
    config: dict[str, Value] = dict(stated) if isinstance(stated, dict) else {}
    zero = config.get("zero_optimization")
    section = {k: v for k, v in (zero if isinstance(zero, dict) else {}).items() if k != "elastic_checkpoint"}
    config["zero_optimization"] = {**section, "stage": stage}
    if not any(key in config for key in ("bf16", "bfloat16", "fp16")) and dtype.name in _HALF_TYPES:
        config["bf16" if dtype.name == "bfloat16" else "fp16"] = {"enabled": True}
    return config
