"""The layout of a Megatron checkpoint to write, and the check that it is possible, before anything is written."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.geometry import slab
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, Value, is_natural
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel, has_mtp
from ckpt_formats.engines.megatron.shared.distributed_optimizer import is_tied
from ckpt_formats.engines.megatron.shared.module_order import ModuleOrder
from ckpt_formats.engines.megatron.shared.names import (
    HEAD,
    TIED,
    WORD_TABLE,
    expert_of,
    is_expert,
    layer_of,
    other_model,
)
from ckpt_formats.engines.megatron.shared.options import LayoutOptions
from ckpt_formats.engines.megatron.shared.rules import layout_of
from ckpt_formats.engines.megatron.shared.stages import Stages, even_stages, has_mtp_elsewhere, stages_of

LAYOUT_STRING = "pipeline_model_parallel_layout"
_FIRST, _LAST = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
_EVEN: Mapping[str, Value] = {
    _FIRST: None,
    _LAST: None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    LAYOUT_STRING: None,
}


@dataclass(frozen=True)
class WriteLayout:
    """A source, and how its model and optimizer are sharded over the new ranks."""

    source: Checkpoint
    args: Arguments
    """The arguments of the new run."""
    parallel: Parallel
    stages: Stages
    layout: Layout
    rows: int | None
    """Rows of the vocabulary's tables with their padding; None: as they are, padded until they divide."""
    distributed: bool
    """Whether the distributed optimizer will load it."""

    @cached_property
    def shared_table(self) -> tuple[str, str] | None:
        """The names on the last and on the first stage of a table that both share, if the source has it once."""
        names = self.source.parameters
        if has_mtp(self.args) and WORD_TABLE in names:
            return WORD_TABLE, WORD_TABLE  # multi-token prediction embeds tokens on the last stage
        aliases = [alias for alias in TIED if alias in self.source.aliases]
        # With one stage there is no copy, so nothing in its files has the copy's name.
        aliases += [alias for alias in TIED if is_tied(self.args) and not (aliases or alias == HEAD)]
        return next(((a, TIED[a]) for a in aliases if a not in names and TIED[a] in names), None)

    @property
    def fused_norms(self) -> bool:
        """Whether projections contain the norm before them, as in Transformer Engine's layers."""
        return self.args.text("transformer_impl") not in ("local", None)

    @property
    def modules(self) -> ModuleOrder:
        latent = self.args.flag("multi_latent_attention")
        return ModuleOrder(self.fused_norms, self.args.flag("moe_grouped_gemm"), latent)

    @property
    def experts(self) -> int:
        """The number of experts of each expert-parallel rank."""
        return self.args.number("num_experts", default=0) // self.parallel.ep


def resolve_layout(source: Checkpoint, options: LayoutOptions) -> WriteLayout:
    """The layout to write. Raises `UnsupportedError` or `RulesError` with the reason if it cannot be written."""
    record = source.extras.get("args")
    if not isinstance(record, Record) or not isinstance(record.state, dict):
        raise UnsupportedError(
            "the source has no arguments of a Megatron run (`args`), which Megatron needs to load a checkpoint",
            where=source.path,
            hint="Only checkpoints of Megatron, and models with a table of names, can be written for it.",
        )
    args = Arguments(record, source.path)
    _check_experts(source, args)
    for name, parameter in source.parameters.items():
        if parameter.role != "extra" and (other := other_model(name)) is not None:
            raise UnsupportedError(
                f"`{printable(name)}` is of another model in the checkpoint ({other}), whose layout no argument states",
                where=source.path,
                hint=f"Leave it out: --skip '^{other}\\.'; or write another format.",
            )
    parallel = _parallel(source, args, options)
    stages = _stages(source, args, parallel, options)
    layout = layout_of(source, options.rules)
    for name, parameter in source.parameters.items():
        if parameter.role != "extra":
            layout.check(name, parameter.weight.shape)
    rows = _rows(source, args, parallel, options)
    distributed = _distributed(args, options)
    changed: dict[str, Value] = {"use_distributed_optimizer": distributed}
    table = source.parameters.get(WORD_TABLE)
    if rows is not None or table is not None:
        old_rows = rows if rows is not None else table.weight.shape[0] if table is not None else 0
        changed["padded_vocab_size"] = -(-old_rows // parallel.tp) * parallel.tp
    return WriteLayout(
        source, with_parallel(args, parallel, stages, changed), parallel, stages, layout, rows, distributed
    )


def _check_experts(source: Checkpoint, args: Arguments) -> None:
    """Raise `UnsupportedError` if the model has more experts than its arguments state: no rank would hold them."""
    stated = args.number("num_experts", default=0)
    for name, parameter in source.parameters.items():
        number = expert_of(name) if parameter.role != "extra" else None
        if number is not None and number >= stated:
            raise UnsupportedError(
                f"`{printable(name)}` is of an expert that the arguments do not have: they state {stated} experts",
                where=source.path,
                hint="The arguments (`num_experts`) contradict the tensors: those of another run, perhaps.",
            )


def _parallel(source: Checkpoint, args: Arguments, degrees: LayoutOptions) -> Parallel:
    """The new degrees: those of the options, else those of the source."""
    stated = source.origin.layout if source.origin.engine == "megatron" else {}

    def degree(requested: int | None, name: str) -> int:
        stated_degree = stated.get(name)
        return (
            requested if requested is not None else stated_degree if is_natural(stated_degree) and stated_degree else 1
        )

    tp, pp, ep = degree(degrees.tp, "tp"), degree(degrees.stage_count, "pp"), degree(degrees.ep, "ep")
    old_tp, old_etp = degree(None, "tp"), degree(None, "etp")
    experts = args.optional("num_experts") or 0
    # By default, Megatron shards an expert over as many ranks as other layers.
    etp = degrees.etp or (tp if old_etp == old_tp else old_etp) if experts else tp
    if degrees.ep and degrees.ep > 1 and not experts:
        raise InvalidArgumentError(
            "the model has no experts, so it has no expert-parallel ranks", hint="Leave --ep out."
        )
    if experts and experts % ep:
        raise InvalidArgumentError(f"{experts} experts do not divide over {ep} expert-parallel ranks")
    ep = ep if experts else 1
    multiple = lcm(tp, etp * ep) // tp
    dp = degrees.dp or -(-degree(None, "dp") // multiple) * multiple
    if tp * dp % (etp * ep):
        raise InvalidArgumentError(
            f"tp {tp} x dp {dp} ranks do not divide by etp {etp} x ep {ep}",
            hint=f"Choose --dp as a multiple of {multiple}.",
        )
    return Parallel(tp, pp, ep, etp, dp, tp * dp // (etp * ep))


def _stages(source: Checkpoint, args: Arguments, parallel: Parallel, degrees: LayoutOptions) -> Stages:
    """Which layers each model chunk has: those of the options; those of the source, if it has as many; else even."""
    layers = 1 + max((n for name in source.parameters if (n := layer_of(name)) is not None), default=-1)
    pp, old = parallel.pp, source.origin.layout
    if degrees.stages is not None:
        return _at(degrees.stages, layers, pp, degrees.vpp or 1)
    is_same_degree = is_natural(old.get("pp")) and old.get("pp") == pp and degrees.vpp in (None, old.get("vpp", 1))
    counts = old.get("layers")
    if is_same_degree and isinstance(counts, list) and all(map(is_natural, counts)) and sum(counts) == layers:
        return Stages(tuple(counts), pp)
    if is_same_degree and source.origin.engine == "megatron":
        try:
            return stages_of(args, pp)
        except UnsupportedError:
            pass
    embedding, loss = (args.flag(f"account_for_{what}_in_pipeline_split") and pp > 1 for what in ("embedding", "loss"))
    with suppress(UnsupportedError):
        return even_stages(layers, pp, degrees.vpp or 1, embedding=embedding, loss=loss)
    try:
        return even_stages(layers, pp, degrees.vpp or 1)
    except UnsupportedError as error:
        raise InvalidArgumentError(error.what, hint=error.hint) from None


def _at(firsts: tuple[int, ...], layers: int, pp: int, chunks: int) -> Stages:
    """The stages that begin at these layers."""
    ends = (*firsts[1:], layers)
    counts = tuple(end - first for first, end in zip(firsts, ends, strict=True))
    if len(firsts) != pp * chunks or firsts[0] != 0 or any(count < 0 for count in counts):
        raise InvalidArgumentError(
            f"--stages {','.join(map(str, firsts))} for {layers} layers and {pp} stages of {chunks} model chunks",
            hint="Give the first layer of each model chunk, in the model's order, from 0 on.",
        )
    return Stages(counts, pp)


def _rows(source: Checkpoint, args: Arguments, parallel: Parallel, options: LayoutOptions) -> int | None:
    """Rows of the vocabulary's tables: those of the options, else as Megatron pads them for this degree, if known.

    Megatron pads the true vocabulary to a multiple of `make_vocab_size_divisible_by` x tp. `vocab_size` is used
    only if it leads to the rows that the source has.
    """
    if options.vocab_rows is not None:
        return options.vocab_rows
    table = source.parameters.get(WORD_TABLE)
    true, divisor = args.optional("vocab_size"), args.optional("make_vocab_size_divisible_by")
    old = source.origin.layout.get("tp")
    if table is None or not true or not divisor or not is_natural(old) or not old:
        return None

    def padded(tp: int) -> int:
        return -(-true // (divisor * tp)) * divisor * tp

    return padded(parallel.tp) if table.weight.shape[0] == padded(old) else None


def _distributed(args: Arguments, degrees: LayoutOptions) -> bool:
    if degrees.zero not in (None, 0, 1):
        raise InvalidArgumentError(
            f"Megatron has no ZeRO stage {degrees.zero}",
            hint="Its distributed optimizer is --zero 1, its plain one --zero 0.",
        )
    return args.flag("use_distributed_optimizer") if degrees.zero is None else degrees.zero == 1


def remarks_of(target: WriteLayout) -> Iterator[str]:
    """Notes for the user about the result."""
    for name, parameter in target.source.parameters.items():
        rows = parameter.weight.shape[0] if parameter.weight.shape else 0
        if target.rows is not None and rows > target.rows and is_padded(target, name):
            yield f"`{printable(name)}` loses {rows - target.rows} of {rows} rows, which pad the vocabulary for tp"


def is_padded(target: WriteLayout, name: str) -> bool:
    """Whether it is a table of the vocabulary, padded so that it divides by the number of ranks."""
    rules = target.layout.matching(name)
    return not is_expert(name) and bool(rules) and (rules[0].padded or rules[0].vocabulary is not None)


def without_padding(target: WriteLayout, name: str, tensor: Tensor) -> Tensor:
    """A tensor without the rows that only pad the vocabulary for the old number of ranks. Lazy."""
    if target.rows is None or not is_padded(target, name) or tensor.shape[0] <= target.rows:
        return tensor
    return tensor.crop(slab(tensor.shape, 0, 0, target.rows))


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
    return with_arguments(new, _stage_arguments(new, stages))


def with_arguments(args: Arguments, changed: Mapping[str, Value]) -> Arguments:
    """The arguments with the values in `changed`."""
    state = args.record.state
    return replace(args, record=replace(args.record, state={**(state if isinstance(state, dict) else {}), **changed}))


def _stage_arguments(args: Arguments, stages: Stages) -> Mapping[str, Value]:
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
        {**_EVEN, LAYOUT_STRING: layout_string(stages, args.number("mtp_num_layers", default=0))},
    )
    state = args.record.state if isinstance(args.record.state, dict) else {}
    return {name: value for name, value in options.items() if value or name in state}


def _give_stages(args: Arguments, stages: Stages) -> bool:
    """True if these arguments give these stages."""
    try:
        return stages_of(args, stages.pp) == stages and not has_mtp_elsewhere(args)
    except UnsupportedError:
        return False


def layout_string(stages: Stages, prediction: int = 0) -> str:
    """The stages as a layout string. E is the embedding, t a layer, L the loss.

    `prediction` is the number of layers for multi-token prediction, m.

    >>> layout_string(Stages((1, 3, 0), 3), 1)
    'Et|ttt|mL'
    """
    return "E" + "|".join("t" * count for count in stages.counts) + "m" * prediction + "L"
