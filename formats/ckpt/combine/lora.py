"""A model with a LoRA adapter merged into it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.combine.adapter import ADAPTER_CONFIG, BASE_LAYER, adapter_config, adapter_tensors, prefix_change
from ckpt.combine.experts import ExpertAxes, expert_modules
from ckpt.combine.lora_experts import merged_experts
from ckpt.combine.lora_merge import LoraMerge
from ckpt.combine.sources import all_files, dropped_notices, model_of, untied_config
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Edit, Parameter, Role
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.identity import joined
from ckpt_formats.core.joined_seals import JoinedSeals
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.quantised.weights import check_not_quantised
from ckpt_formats.core.tensor import Tensor


@dataclass(frozen=True)
class MergeLora(Edit):
    """An adapter merged into the weights."""

    adapter: tuple[Path, tuple[Edit, ...]]
    scale: float

    def inputs(self) -> tuple[Path, ...]:
        return (self.adapter[0],)


@checked
def merge_lora(
    model: Checkpoint, adapter: Checkpoint, scale: float | None = None, *, expert_axes: ExpertAxes | None = None
) -> Checkpoint:
    """The weights of `model` with a LoRA adapter of PEFT merged into them, as its `merge_and_unload()` does.

    LoRA, rsLoRA and DoRA of linear, `Conv1D` (GPT-2), embedding and convolution layers, `rank_pattern`,
    `alpha_pattern`, `modules_to_save` and `bias`. `scale` multiplies the scale of each low-rank update (which is
    `lora_alpha / r`); None: 1. Tensors that the adapter holds in full replace those of the model.

    Experts may be updated one by one, by PEFT's `target_parameters`, by stacks (experts, ...) of A and B, or by an A or
    B that all experts share; the model may store them one by one or as a stack, and gate and up projections apart or in
    one matrix. The result has the same bits for each layout. `expert_axes` states how the model stores the weights of
    its experts, "out-in" or "in-out"; ckpt needs it only if they are square and other weights of their module do not
    show it.

    Arithmetic: `B @ A` is summed over the rank in ascending order; each product and sum is formed in float64 and
    rounded to float32, like a fused multiply-add. Then come the scale, the model's weight and DoRA's factor, in
    float32, and one rounding to the weight's own type. PEFT does the same with the adapter in float32, its default.
    Only the order in which its matrix product adds is not specified; where it is the same, results are equal bit by
    bit; PEFT's merge on a CPU adds in that order up to rank 192 at least, where this was tried. Two things differ:
    DoRA's norm is a float32 sum in PEFT and a float64 sum here, so a weight with n inputs may differ by its
    (n + 8) * 2**-24th part; and PEFT rounds the update of a 16-bit embedding once more, before it adds it. Weights in
    float64 are computed in float64.

    Reading a block reads the same block of the weight, and of A and B the columns and rows that belong to it. DoRA
    also reads, once for each output, all weights that lead to it. Memory: these parts of A and B, and a few blocks of
    64 Ki elements.

    A weight that is tied to another in the model gets values of its own if only one of the two is adapted.

    Raises `InvalidArgumentError` for a scale that is not finite, and for other axes.
    Raises `UnsupportedError` for another kind of adapter or an option that is not known, `IncompleteError` if the
    model has no weight for a module of the adapter, or the adapter lacks a tensor, `NotFoundError` if there is no
    configuration.
    """
    if ADAPTER_CONFIG in model.extras and ADAPTER_CONFIG not in adapter.extras:
        raise InvalidArgumentError(
            "the model is an adapter, and the adapter is none",
            where=model.path,
            hint="Name the model first, then its adapter.",
        )
    config = adapter_config(adapter)
    base = model_of(model)
    base = replace(base, aliases={alias: name for alias, name in base.aliases.items() if name in base.parameters})
    updates, full = adapter_tensors(adapter)
    experts, single = expert_modules(adapter, updates, config, base)
    concerned = {*updates, *experts, *(name.replace(BASE_LAYER, ".").rpartition(".")[0] for name in full)}
    check_not_quantised(base, "merged", concerned)
    prefix = prefix_change(adapter, list(single), list(experts), full, base)
    merge = LoraMerge(base, adapter, config, prefix, 1.0 if scale is None else float(scale))
    new = {
        **merge.full_tensors(full),
        **merge.updated_weights(single, full),
        **merged_experts(merge, experts, expert_axes),
    }
    parameters = dict(base.parameters)
    aliases = dict(base.aliases)
    untied = []
    for alias, name in base.aliases.items():
        if alias in new or name in new:
            untied.append(alias)
            del aliases[alias]
            shared = merge.base_weight(base.parameters[name].weight, name, full)
            parameters[alias] = replace(base.parameters[name], name=alias, states={MODEL: shared})
    for name, tensor in new.items():
        role: Role = parameters[name].role if name in parameters else "parameter"
        parameters[name] = Parameter(name, role, {MODEL: tensor})
    added = [name for name in new if name not in base.parameters and name not in base.aliases]
    unchanged = {name for name, p in model.parameters.items() if name not in new and MODEL in p.states}
    notices = [*dropped_notices([model]), *_merge_notices(untied, added, scale, full)]
    edit = MergeLora((adapter.path, adapter.history), 1.0 if scale is None else float(scale))
    return edited(
        base,
        edit,
        parameters=parameters,
        aliases=aliases,
        extras=untied_config(base.extras) if untied else base.extras,
        files=all_files([base, adapter]),
        seals=JoinedSeals((base.seals, adapter.seals)),
        notices=tuple(dict.fromkeys((*base.notices, *notices))),
        digests={key: value for key, value in base.digests.items() if key[0] in unchanged and key[1] == MODEL},
        errors={key: value for key, value in base.errors.items() if key[0] in unchanged and key[1] == MODEL},
        identities=joined(base.identities, adapter.identities),
    )


def _merge_notices(
    untied: Sequence[str], added: Sequence[str], scale: float | None, full: Mapping[str, Tensor]
) -> Iterator[Notice]:
    if untied:
        text = "tied to another weight in the model; now stored apart, since the adapter changes only one of the two"
        yield Notice(text, tuple(untied), Weight.UNSURE)
    if added:
        yield Notice("tensors of the adapter which the model does not have", tuple(added))
    if full and scale not in (None, 1):
        yield Notice("tensors that the adapter holds in full are not scaled", tuple(full), Weight.UNSURE)
