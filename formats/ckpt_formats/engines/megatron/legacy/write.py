"""Writing the legacy layout: a folder for each rank, with its model and its optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_formats.containers.torchfile_tree import tree_part
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.format import FilePlan, Plan
from ckpt_formats.core.notices import unsure
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.megatron.legacy.files import folder_name, saving_ranks
from ckpt_formats.engines.megatron.shared.folder import MODEL_FILE, OPTIMIZER_FILE, folder_of
from ckpt_formats.engines.megatron.shared.split import LocalParameter, RankCoords, RankShards
from ckpt_formats.engines.megatron.shared.write_buffers import buffers_file
from ckpt_formats.engines.megatron.shared.write_extras import RankExtras
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.shared.write_module import state_dict_of
from ckpt_formats.engines.megatron.shared.write_names import as_saved
from ckpt_formats.engines.megatron.shared.write_optimizer import WrittenOptimizer, optimizer_of, trained_of

_CONTAINER: Mapping[str, Value] = {"ckpt_format": "torch", "use_dist_ckpt": False}


def plan(target: WriteLayout) -> Plan:
    """The files of every rank. Raises `Unsupported` or `BadRules` for what Megatron could not load."""
    _check_grid(target)
    optimizer = optimizer_of(target)
    files = tuple(_SharedContent(target, RankShards(target), RankExtras(target), optimizer).all())
    return Plan(files, notes=unsure(_remarks(target, optimizer)))


@dataclass(frozen=True)
class _SharedContent:
    """What every file of a target holds."""

    target: WriteLayout
    ranks: RankShards
    items: RankExtras
    optimizer: WrittenOptimizer | None

    def all(self) -> Iterator[FilePlan]:
        run = folder_of(self.target.source.origin.step)
        for numbers, place in _places(self.target):
            folder = f"{run}/{folder_name(numbers)}"
            chunks = [as_saved(self.target, chunk) for chunk in self.ranks.chunks(place)]
            held = [_parameter(one) for chunk in chunks for one in chunk]
            parallel = self.target.parallel
            rank = {"tp": place.tp, "pp": place.pp} | ({"ep": place.ep} if parallel.ep > 1 else {})
            yield tree_part(f"{folder}/{MODEL_FILE}", self._model(place, chunks), held, "model", rank)
            if self.optimizer is not None and self.target.distributed:
                tree = self._buffers(place, chunks)
                yield tree_part(f"{folder}/{OPTIMIZER_FILE}", tree, held, "optimizer", rank)

    def _model(self, place: RankCoords, chunks: Sequence[Sequence[LocalParameter]]) -> dict[str, Value]:
        items = self.items.of(place)
        extra = self.items.extra_states(place)
        plain = self.optimizer is not None and not self.target.distributed
        modules = [
            state_dict_of(self.target, place, number, chunk, extra, plain=plain) for number, chunk in enumerate(chunks)
        ]
        names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
        first = {key: items.pop(key) for key in ("checkpoint_version", "iteration")}
        tree = {"args": _args(self.items.args(place)), **first, **dict(zip(names, modules, strict=True))}
        if self.optimizer is not None:
            trained = [trained_of(chunk) for chunk in chunks]
            tree["optimizer"] = self.optimizer.entry(trained, self.items.optimizer(place))
        return tree | items

    def _buffers(self, place: RankCoords, chunks: Sequence[Sequence[LocalParameter]]) -> Value:
        trained = [trained_of(chunk) for chunk in chunks]
        parallel = self.target.parallel
        if parallel.ep == 1:
            return buffers_file(self.target, trained, place.pp, None)
        # The dense parameters' optimizer is shared by more ranks than an expert's: the first of them saves.
        saves = place.ep * parallel.etp + place.etp < parallel.tp
        dense = buffers_file(self.target, trained, place.pp, False) if saves else None
        return [dense, buffers_file(self.target, trained, place.pp, True)]


def _args(record: Record) -> Record:
    """Arguments that name this layout, if any of them names one."""
    state = dict(record.state)
    return replace(record, state=state | {name: value for name, value in _CONTAINER.items() if name in state})


def _places(target: WriteLayout) -> Iterator[tuple[tuple[int, ...], RankCoords]]:
    for numbers, tp, pp, ep, etp in saving_ranks(target.parallel):
        yield numbers, RankCoords(tp, pp, ep, etp)


def _parameter(one: LocalParameter) -> Parameter:
    return Parameter(one.name, one.parameter.role, one.states, one.values)


def _check_grid(target: WriteLayout) -> None:
    """A folder is saved by the first rank with its experts. Raises `Unsupported` if these ranks have not all shards."""
    tp, ep, etp = target.parallel.tp, target.parallel.ep, target.parallel.etp
    if etp > tp or (ep * etp) % tp:
        raise Unsupported(
            f"Megatron's legacy layout cannot hold tp {tp} with ep {ep} and etp {etp}: "
            "the ranks that save do not have all of the model",
            hint="Say --to megatron for torch_dist, or --etp as --tp.",
        )


def _remarks(target: WriteLayout, optimizer: WrittenOptimizer | None) -> Iterator[str]:
    items = RankExtras(target)
    places = [place for _, place in _places(target)]
    if "rng_state" not in target.source.extras:
        yield "no random states came with the source: load with --no-load-rng"
    elif new := sum(map(items.is_new, places)):
        yield f"{new} of {len(places)} ranks have no random states of their own: they go on with another's"
    if optimizer is None:
        yield "no optimizer came with the source: load with --no-load-optim, or --finetune"
