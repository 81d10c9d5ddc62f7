"""Write `torch_dist`: a distributed checkpoint, `common.pt` and `metadata.json`.

Each rank of the new run has the files that it would write itself: `__R_0.distcp`, `__R_1.distcp`. If several ranks
have the same shard, the first of them writes it. The optimizer's states can be loaded at any degrees: Megatron calls
this form `fully_reshardable`. Megatron's own error in saving it (see `master_check`) does not occur here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ckpt_formats.containers.torchfile_tree import tree_part, write_tree
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FileLayouts, FilePlan, Plan, Receipt, TensorRanges
from ckpt_formats.core.notices import Notice, unsure
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.dcp.balance import BytesPerRank
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts, ItemsContent, block_of
from ckpt_formats.engines.dcp.write import write_metadata, write_part
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE
from ckpt_formats.engines.megatron.shared.folder import folder_of
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.write_extras import RankExtras
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.shared.write_optimizer import WrittenOptimizer, of_one, optimizer_of
from ckpt_formats.engines.megatron.torch_dist.keys import MIXED, Keys
from ckpt_formats.engines.megatron.torch_dist.objects import RANDOM, ObjectShards, is_object
from ckpt_formats.engines.megatron.torch_dist.shards import KeyedTensors
from ckpt_formats.state_dicts.extras import tensors_for_names

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


CONTENT = "content_metadata"
_RESHARDABLE = "fully_reshardable"
_TYPE = "distrib_optim_sharding_type"
_FIRST = RankCoords(0, 0)


@dataclass(frozen=True)
class CommonState:
    """The contents of `common.pt`."""

    target: WriteLayout
    keys: Keys
    items: RankExtras
    optimizer: WrittenOptimizer | None

    def tree(self) -> dict[str, Value]:
        items = {k: v for k, v in self.items.of(_FIRST).items() if k != RANDOM and not is_object(k)}
        tree: dict[str, Value] = {"args": self.args(), **items}
        if self.optimizer is not None:
            tree["optimizer"] = self._optimizer(self.optimizer)
        return {**tree, CONTENT: self._content()}

    def args(self) -> Record:
        """The new run's arguments.

        They state what is not saved (no_save_optim, no_save_rng), so that Megatron skips it.
        """
        record, extras = self.items.args(_FIRST), self.target.source.extras
        stated: dict[str, Value] = {
            "ckpt_format": "torch_dist",
            "use_dist_ckpt": True,
            "dist_ckpt_format": "torch_dist",
        }
        if self.target.distributed:
            stated["dist_ckpt_optim_fully_reshardable"] = True
        changed = {name: value for name, value in stated.items() if record.get(name) is not None}
        for name, is_saved in (("no_save_optim", self.optimizer is not None), ("no_save_rng", RANDOM in extras)):
            if not is_saved or record.get(name):
                changed[name] = not is_saved
        return replace(record, state={**record.state, **changed})

    def _content(self) -> dict[str, Value]:
        """The `content_metadata`, by which Megatron chooses the keys to load."""
        content = self.target.source.extras.get(CONTENT)
        entries = content.items() if isinstance(content, dict) else ()
        retained = {key: value for key, value in entries if not str(key).startswith("distrib_optim")}
        encoding = {_TYPE: _RESHARDABLE} if self.target.distributed else {}
        mixed = {MIXED: True} if self.keys.differing else {}
        return {**retained, **encoding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, **mixed}

    def _optimizer(self, optimizer: WrittenOptimizer) -> Value:
        own = self.items.optimizer(_FIRST)
        if not optimizer.separate_experts:
            return self._one(optimizer, False, own)
        return {int(experts): self._one(optimizer, experts, own) for experts in (False, True)}

    def _one(self, optimizer: WrittenOptimizer, experts: bool, own: Value) -> dict[str, Value]:
        """The items of one optimizer that are not states; `experts` selects the groups of experts or the others."""
        source = self.target.source
        other_items = {
            key: tensors_for_names(value, source.parameters) for key, value in of_one(own, int(experts)).items()
        }
        groups: list[Value] = [dict(group.options) for group in optimizer.groups if group.experts == experts]
        state: dict[str, Value] = {}
        step = optimizer.step
        if step is not None and (self.target.distributed or isinstance(step, int)):
            groups = [{**group, "step": step} for group in groups]  # fused optimizers store the step there as well
        elif step is not None:
            state["common_step"] = Tensor.of(ArrayBlob(np.array(step, np.float32)))
        inner: dict[str, Value] = {"param_groups": groups, **other_items.pop("optimizer", {})}
        if self.target.distributed:
            return {"optimizer": inner, **other_items, "param_state_sharding_type": _RESHARDABLE}
        inner = {"state": state, **inner}
        return {"optimizer": inner, **other_items} if optimizer.low_precision else {**inner, **other_items}


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
