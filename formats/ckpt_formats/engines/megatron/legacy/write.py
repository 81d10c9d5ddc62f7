"""Write the legacy layout: a folder for each rank, with its model and its optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_formats.containers.torchfile_tree import tree_part
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import UnsupportedError
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
    """The files of every rank. Raises `UnsupportedError` or `RulesError` for what Megatron could not load."""
    _check_grid(target)
    optimizer = optimizer_of(target)
    files = tuple(_SharedContent(target, RankShards(target), RankExtras(target), optimizer).all())
    return Plan(files, notes=unsure(_remarks(target, optimizer)))


@dataclass(frozen=True)
class _SharedContent:
    """The data of a target that all its files share."""

    target: WriteLayout
    ranks: RankShards
    items: RankExtras
    optimizer: WrittenOptimizer | None

    def all(self) -> Iterator[FilePlan]:
        """The files of every rank that saves."""
        run = folder_of(self.target.source.origin.step)
        for numbers, place in _places(self.target):
            folder = f"{run}/{folder_name(numbers)}"
            chunks = [as_saved(self.target, chunk) for chunk in self.ranks.chunks(place)]
            parameters = [_parameter(parameter) for chunk in chunks for parameter in chunk]
            parallel = self.target.parallel
            rank = {"tp": place.tp, "pp": place.pp} | ({"ep": place.ep} if parallel.ep > 1 else {})
            yield tree_part(f"{folder}/{MODEL_FILE}", self._model(place, chunks), parameters, "model", rank)
            if self.optimizer is not None and self.target.distributed:
                tree = self._buffers(place, chunks)
                yield tree_part(f"{folder}/{OPTIMIZER_FILE}", tree, parameters, "optimizer", rank)

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
        # More ranks share the dense parameters' optimizer than an expert's: the first of these ranks saves it.
        saves = place.ep * parallel.etp + place.etp < parallel.tp
        dense = buffers_file(self.target, trained, place.pp, False) if saves else None
        return [dense, buffers_file(self.target, trained, place.pp, True)]


def _args(record: Record) -> Record:
    """The arguments, with this layout's values for those that name a layout."""
    state = dict(record.state)
    return replace(record, state=state | {name: value for name, value in _CONTAINER.items() if name in state})


def _places(target: WriteLayout) -> Iterator[tuple[tuple[int, ...], RankCoords]]:
    for numbers, tp, pp, ep, etp in saving_ranks(target.parallel):
        yield numbers, RankCoords(tp, pp, ep, etp)


def _parameter(parameter: LocalParameter) -> Parameter:
    return Parameter(parameter.name, parameter.model_parameter.role, parameter.states, parameter.values)


def _check_grid(target: WriteLayout) -> None:
    """Raise `UnsupportedError` if the ranks that save (the first of each set of experts) do not have all shards."""
    tp, ep, etp = target.parallel.tp, target.parallel.ep, target.parallel.etp
    if etp > tp or (ep * etp) % tp:
        raise UnsupportedError(
            f"Megatron's legacy layout cannot store tp {tp} with ep {ep} and etp {etp}: "
            "the ranks that save do not have all parts of the model",
            hint="Use --to megatron for torch_dist, or make --etp equal to --tp.",
        )


def _remarks(target: WriteLayout, optimizer: WrittenOptimizer | None) -> Iterator[str]:
    items = RankExtras(target)
    places = [place for _, place in _places(target)]
    if "rng_state" not in target.source.extras:
        yield "the source has no random states: load with --no-load-rng"
    elif new := sum(map(items.is_new, places)):
        yield f"{new} of {len(places)} ranks have no random states in the source: they get those of another rank"
    if optimizer is None:
        yield "the source has no optimizer: load with --no-load-optim, or --finetune"
