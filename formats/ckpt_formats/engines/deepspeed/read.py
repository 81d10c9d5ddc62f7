"""Read a DeepSpeed checkpoint: the files of all ranks -> one checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Origin, Parameter
from ckpt_formats.core.coming_reads import requested
from ckpt_formats.core.errors import CorruptError, form_of
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.rounded import is_rounded
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.deepspeed.agreement import step_notices
from ckpt_formats.engines.deepspeed.extras import BUFFERS, UNPLACED, collect_extras
from ckpt_formats.engines.deepspeed.folder import list_folder, step_of
from ckpt_formats.engines.deepspeed.merge import merge_groups, merge_rows, merge_stages
from ckpt_formats.engines.deepspeed.pipeline import find_pipeline
from ckpt_formats.engines.deepspeed.rank import RankState, read_ranks
from ckpt_formats.engines.deepspeed.step import OpenedStep, open_step, rank_name, source_files
from ckpt_formats.engines.deepspeed.weights import tied_layers
from ckpt_formats.state_dicts.parameter_order import BY_ORDER
from ckpt_formats.state_dicts.universal_info import ORIGIN, rules_of

_SAMPLED_VALUES = 64
_MAX_SAMPLES = 4


def read_folder(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of a checkpoint. Raises subclasses of `CkptError`."""
    folder = list_folder(step_of(path))
    with form_of("a DeepSpeed checkpoint", folder.path):
        return _read(path, open_step(folder), options)


def _read(path: Path, step: OpenedStep, options: ReadOptions) -> Checkpoint:
    ranks = read_ranks(step, options.order)
    stages = merge_rows(ranks, step.tp, lambda mp: Layout((*options.rules, *own_rules(step, mp))))
    parameters, tied = merge_stages(stages)
    check_same_run(parameters, step.folder.path)
    models = {rank_name(file.path): file for mp in range(step.folder.mp) for file in step.models(mp)}
    optims = {rank_name(file.path): file for mp in range(step.folder.mp) for file in step.optims(mp)}
    optims |= {rank_name(path): step.files[path] for path in step.folder.expert_optim.values()}
    extra_items = {path: items for rank in ranks for path, items in rank.extra_items.items()}
    extras = collect_extras(models, optims, parameters, extra_items)
    return Checkpoint(
        path=path,
        origin=origin_of(step, [list(stage) for stage in stages]),
        parameters=parameters,
        groups=merge_groups([rank.groups for rank in ranks], step.folder.path),
        extras=extras,
        aliases={alias: name for rank in ranks for alias, name in rank.aliases.items() if name in parameters},
        files=tuple(source_files(step)),
        seals=tuple(seal for file in step.files.values() for seal in file.seals()),
        notices=(*notices_of(tied), *_notices(step, ranks, extras)),
        layout=Layout((*options.rules, *own_rules(step, 0))),
    )


def own_rules(step: OpenedStep, mp: int) -> tuple[Rule, ...]:
    file = step.models(mp)[0]
    info = file.root.get(ORIGIN)
    return rules_of(info, file.path) if isinstance(info, dict) and info else ()


def notices_of(tied: list[str]) -> tuple[Notice, ...]:
    if not tied:
        return ()
    return (Notice("on several pipeline stages; the first stage's copy is used", tuple(tied)),)


def _notices(step: OpenedStep, ranks: Sequence[RankState], extras: Mapping[str, Value]) -> Iterator[Notice]:
    models = [file for mp in range(step.folder.mp) for file in step.models(mp)]
    yield from step_notices(models)
    if step.folder.optim and (twice := [file.path.name for file in models if file.root.get("optimizer")]):
        text = "the optimizer has its own files; `optimizer` in these files is not read"
        yield Notice(text, tuple(twice), Weight.LOST)
    if any(rank.by_order for rank in ranks):
        yield Notice(BY_ORDER, weight=Weight.UNSURE)
    if unknown := tuple(name for rank in ranks for name in rank.unknown):
        text = "no optimizer has these parameters of pipeline layers: they are frozen, or left over from another save"
        yield Notice(text, unknown, Weight.UNSURE)
    if any(BUFFERS in items for rank in ranks for items in rank.extra_items.values()):
        text = "ranks differ in some buffers: the first rank's values are used, the others are stored under `ranks`"
        yield Notice(text)
    if unplaced := sorted(
        {key for rank in ranks for items in rank.extra_items.values() for key in items.get(UNPLACED, ())}
    ):
        text = "states of the optimizer's groups that match no parameter: stored as each rank has them"
        yield Notice(text, tuple(unplaced), Weight.UNSURE)


def origin_of(step: OpenedStep, by_stage: list[list[str]]) -> Origin:
    root = step.first.root
    steps, version = root.get("global_steps"), root.get("ds_version")
    zero = step.config.get("zero_optimization")
    stage = 3 if step.stage3 else zero.get("stage") if isinstance(zero, dict) else None
    dp = step.folder.dp or root.get("dp_world_size")
    layout: dict[str, Value] = {"zero_stage": stage, "dp": dp, "tp": step.tp, "pp": step.pp}
    if step.folder.experts:
        layout["experts"] = 1 + max(expert for _, _, expert in step.folder.experts)
    if step.folder.layers:
        files = {key: step.files[file] for key, file in step.folder.layers.items()}
        layout["pipeline"] = find_pipeline(
            by_stage, tied_layers(files, [n for names in by_stage for n in names])
        ).to_json()
    return Origin("deepspeed", None if version is None else str(version), steps if is_natural(steps) else None, layout)


def check_same_run(parameters: Mapping[str, Parameter], where: Path) -> None:
    """Raise `CorruptError` if none of the samples of the masters in one file rounds to the weights in another file."""
    with Reader(check=False) as reader:
        for (path, other), samples in requested(_samples(parameters).items(), lambda item: _first_sample(item[1])):
            if not any(is_rounded(copy.crop(box), master.crop(box), reader) for master, copy, box in samples):
                raise CorruptError(
                    f"the masters in {path.name} do not belong to the weights in {other.name}",
                    where=where,
                    hint="Files of several steps or runs were mixed: copy all files of one step again.",
                )


def _samples(parameters: Mapping[str, Parameter]) -> dict[tuple[Path, Path], list[tuple[Tensor, Tensor, Box]]]:
    """A few blocks as (master, model's copy, block), by the two files that hold their values."""
    samples: dict[tuple[Path, Path], list[tuple[Tensor, Tensor, Box]]] = {}
    for parameter in parameters.values():
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
        if master is None or copy is None or master.shape != copy.shape:
            continue
        of_copy = list(_boxes(copy))
        for path, first in _boxes(master) if of_copy else ():
            for other, box in of_copy:
                pair = path, other
                if len(samples.get(pair, ())) < _MAX_SAMPLES and (block := _first_common(first, box)) is not None:
                    samples.setdefault(pair, []).append((master, copy, block))
    return samples


def _first_sample(samples: list[tuple[Tensor, Tensor, Box]]) -> tuple[Tensor, Tensor]:
    """The values of the first sample, which nearly always agree: then no other one is read."""
    master, copy, box = samples[0]
    return master.crop(box), copy.crop(box)


def _boxes(tensor: Tensor) -> Iterator[tuple[Path, Box]]:
    for fragment in tensor.fragments:
        if isinstance(fragment.blob, FileBlob):
            yield fragment.blob.path, fragment.box


def _first_common(a: Box, b: Box) -> Box | None:
    """The first `_SAMPLED_VALUES` elements of the intersection of two blocks; None if it is empty."""
    shared = a & b
    return None if shared is None else next(slabs(shared.shape, _SAMPLED_VALUES)).shift(shared.start)
