"""Write `torch_dist`: a distributed checkpoint, `common.pt` and `metadata.json`.

Each rank of the new run has the files that it would write itself: `__R_0.distcp`, `__R_1.distcp`. If several ranks
have the same shard, the first of them writes it. The optimizer's states can be loaded at any degrees: Megatron calls
this form `fully_reshardable`. Megatron's own error in saving it (see `master_check`) does not occur here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_formats.containers.torchfile_tree import tree_part, write_tree
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FileLayouts, FilePlan, Plan, Receipt, TensorRanges
from ckpt_formats.core.notices import Notice, unsure
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Record
from ckpt_formats.engines.dcp.balance import BytesPerRank
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts, ItemsContent, block_of
from ckpt_formats.engines.dcp.write import write_metadata, write_part
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE
from ckpt_formats.engines.megatron.shared.folder import folder_of
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.write_extras import RankExtras
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.shared.write_optimizer import WrittenOptimizer, optimizer_of
from ckpt_formats.engines.megatron.torch_dist.common import CommonState
from ckpt_formats.engines.megatron.torch_dist.keys import Keys
from ckpt_formats.engines.megatron.torch_dist.objects import RANDOM, ObjectShards
from ckpt_formats.engines.megatron.torch_dist.shards import KeyedTensors

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_OF_RANKS = {"rank", "local_rank"}
"""Arguments that are only the number of the rank that saves them."""
_FILES_PER_RANK = 2
"""Megatron's default: the files of a rank can be written in parallel."""


def plan(target: WriteLayout) -> Plan:
    """The files of every rank. Raises `UnsupportedError` or `RulesError` for what Megatron could not load."""
    _check_names(target)
    optimizer, items, keys = optimizer_of(target, frozen=True), RankExtras(target), Keys(target)
    if optimizer is not None:
        _check_states(optimizer)
    folder, layouts = folder_of(target.source.origin.step), EntryLayouts()
    common = tree_part(f"{folder}/common.pt", CommonState(target, keys, items, optimizer).tree(), (), "common")
    backends = json.dumps(_BACKENDS).encode()
    files = (
        common,
        FilePlan(f"{folder}/metadata.json", (), backends, len(backends), "metadata"),
        *(part for one in _by_rank(target, keys, items, optimizer) for part in one.parts(folder, layouts)),
    )
    return Plan(files, tuple(map(Notice, _losses(target))), unsure(_remarks(target, items, optimizer)))


def write(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write one file and return its receipt."""
    (folder / part.file).parent.mkdir(exist_ok=True)
    if isinstance(part.content, ItemsContent):
        return write_part(folder, part, transfer)
    if not isinstance(part.content, bytes):
        return write_tree(folder, part, transfer)
    seal = write_sealed(folder, part.file, [part.content])
    return Receipt(part.file, seal.nbytes, (seal,), {})


def write_index(folder: Path, receipts: Sequence[Receipt]) -> None:
    """Write `.metadata`, which states the file and offset of every item."""
    write_metadata(folder, [receipt for receipt in receipts if "items" in receipt.entry], named=False)


@dataclass(frozen=True)
class _Blocks(FileLayouts):
    """The tensors of a file follow from its entries: they are made when somebody asks for them."""

    def lay_out(self, file: FilePlan) -> FilePlan:
        assert isinstance(file.content, ItemsContent)
        tensors = tuple(block_of(entry) for entry in file.content.entries if entry.box is not None)
        return replace(file, tensors=tensors, layouts=None)

    def names(self, file: FilePlan) -> Sequence[str]:
        return [parameter.name for parameter in file.parameters]

    def ranges(self, file: FilePlan) -> Sequence[TensorRanges]:
        return self.lay_out(file).ranges()


@dataclass
class _RankFiles:
    """The entries that one rank writes."""

    number: int
    place: RankCoords
    entries: list[tuple[Entry, Parameter | None]] = field(default_factory=list)
    """Each with its parameter; None for objects."""

    def parts(self, folder: str, layouts: EntryLayouts) -> Iterator[FilePlan]:
        """The rank's files, of about equal size."""
        by_file: list[list[tuple[Entry, Parameter | None]]] = [[] for _ in range(_FILES_PER_RANK)]
        loads = BytesPerRank(_FILES_PER_RANK)
        for entry, parameter in self.entries:
            by_file[loads.give(range(_FILES_PER_RANK), layouts.of(entry).nbytes)].append((entry, parameter))
        rank = {"rank": self.number, "tp": self.place.tp, "pp": self.place.pp}
        blocks = _Blocks()
        for k, pairs in enumerate(by_file):
            if pairs:
                yield FilePlan(
                    f"{folder}/__{self.number}_{k}.distcp",
                    tuple({owner.name: owner for _, owner in pairs if owner is not None}.values()),
                    ItemsContent(tuple(entry for entry, _ in pairs)),
                    loads.nbytes[k],
                    "data",
                    rank,
                    layouts=blocks,
                )


def _by_rank(
    target: WriteLayout, keys: Keys, items: RankExtras, optimizer: WrittenOptimizer | None
) -> Iterable[_RankFiles]:
    ranks: dict[int, _RankFiles] = {}

    def rank(place: RankCoords) -> _RankFiles:
        number = items.rank(place)
        return ranks.setdefault(number, _RankFiles(number, place))

    tensors, count = KeyedTensors(target, keys, optimizer), 0
    for place, parameter, entry in tensors.entries():
        rank(place).entries.append((entry, parameter))
        count = max(count, entry.number + 1)
    for place, entry in ObjectShards(target, keys, items, tensors).entries(count):
        rank(place).entries.append((entry, None))
    return [ranks[number] for number in sorted(ranks)]


def _check_names(target: WriteLayout) -> None:
    for name, parameter in target.source.parameters.items():
        if parameter.role != "extra" and name.startswith(("language_model.", "word_embeddings", "lm_head.")):
            raise UnsupportedError(
                f"`{printable(name)}` is a name from before Megatron core, which its distributed checkpoints do not "
                "use",
                where=target.source.path,
                hint="Use --to megatron-legacy, which keeps the names.",
            )


def _check_states(optimizer: WrittenOptimizer) -> None:
    for parameter in optimizer.trained.values():
        for state, tensor in parameter.states.items():
            if "." in state or (tensor.shape != parameter.weight.shape and state != "step"):
                raise UnsupportedError(
                    f"Megatron's distributed checkpoints have no place for the optimizer state `{printable(state)}` of "
                    f"`{printable(parameter.name)}`, of shape {list(tensor.shape)}",
                    hint="Use --to megatron-legacy, or --model-only.",
                )


def _remarks(target: WriteLayout, items: RankExtras, optimizer: WrittenOptimizer | None) -> Iterator[str]:
    parallel = target.parallel
    places = [RankCoords(tp, pp) for pp in range(parallel.pp) for tp in range(parallel.tp)]
    if RANDOM not in target.source.extras:
        yield "the source has no random states: Megatron creates new ones from the run's seed"
    elif new := sum(map(items.is_new, places)):
        yield f"{new} of {len(places)} ranks have no random states in the source: they get those of another rank"
    if dropped := items.count - (len(places) - sum(map(items.is_new, places))):
        yield f"values of {dropped} ranks of the source, mainly random states: the new run has no such ranks"
    if optimizer is None:
        yield "the source has no optimizer: load with --no-load-optim, or --finetune"


def _losses(target: WriteLayout) -> Iterator[str]:
    """Values in which ranks differ and for which distributed checkpoints have no place."""
    by_rank = target.source.extras.get("ranks")
    own: dict[str, set[str]] = {}
    for items in by_rank.values() if isinstance(by_rank, Mapping) else ():
        for key, value in items.items() if isinstance(items, Mapping) else ():
            if key not in (RANDOM, EXTRA_STATE):
                fields = value.state if isinstance(value, Record) else None
                own.setdefault(str(key), set()).update(map(str, fields) if isinstance(fields, dict) else ())
    own = {key: fields - _OF_RANKS for key, fields in own.items() if not fields or fields - _OF_RANKS}
    for key, fields in own.items():
        listed = f" ({', '.join(sorted(fields)[:5])})" if fields else ""
        yield f"the values of `{printable(key)}`{printable(listed)} in which ranks differ: the first rank's are written"
